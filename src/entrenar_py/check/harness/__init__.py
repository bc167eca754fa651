"""The search for falsifications: plan, run, judge, explore, shrink, and judge stored traces."""
