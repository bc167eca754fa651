"""What a run found, and how people and machines read it: terminal, JSON, JUnit XML."""
