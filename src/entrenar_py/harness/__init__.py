"""The search for a falsification: plan, run, judge, explore, shrink; stored traces, too."""
