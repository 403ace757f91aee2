"""The queue of work: which conversations have something to summarize, and who takes it."""
