"""What a rank needs to continue training bit for bit: held in host memory, written to files, and read again."""
