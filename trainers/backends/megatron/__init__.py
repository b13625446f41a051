"""Training with megatron-core: a model split over ranks by tensors, layers and experts."""
