"""The search for a falsification: plan, run, judge, explore, shrink, and judge stored traces."""
