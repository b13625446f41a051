"""What lag will this configuration give? The real loop on the virtual clock around simulated generators and trainer."""
