"""Trainers: plan on the driver, gradients on the ranks."""
