"""Faults in the processes of a real run, at seeded moments: `scripts/chaos`, and the tests with the mark `chaos`.

A session runs one small training run on Ray and TransferQueue, breaks a part of it, waits until the run has recovered
or has failed cleanly, resumes it in the second case, and goes on to the next fault. At its end the data is run to the
end of an epoch, and the event log of all parts of the run must account for every prompt.
"""
