"""The run folder: the files of a run, how they are made safe, and how a run resumes from them."""
