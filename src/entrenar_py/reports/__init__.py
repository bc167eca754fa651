"""The report of a run, as people and machines read it: terminal, JSON, JUnit XML and more."""
