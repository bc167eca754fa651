"""Reports of a run for people and machines: terminal, JSON, JUnit XML, SARIF, HTML, GitHub."""
