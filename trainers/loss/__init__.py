"""What is minimised: advantages, normalisation, objective."""
