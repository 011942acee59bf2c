"""The model of a training step, over arrays: each rule once, for one scenario or a million.

Axis 0 of every array is the case: a scenario is one case, a search has a hundred thousand, a mixed
cluster has one for each placement, and draws of a step are cases too. A rule is written over
columns of cases and is read by simulation and search alike; nothing here knows which of them calls.
Pipelines and what is held have rooms of their own, `pipelines` and `held`.

`axes.py` names the axes and is how shapes are stated: `PerCase` is an array of shape [case]. Where
a comment has to tell a shape in letters, they are those of the table in `axes.py`.
"""
