"""Starting, supervising and stopping what a run is made of."""
