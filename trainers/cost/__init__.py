"""What a sample costs: FLOPs by its tokens, a device's peak, seconds by step."""
