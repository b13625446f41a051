"""The planner behind `plan_batch`: samples into micro-batches (bins), micro-batches onto ranks."""
