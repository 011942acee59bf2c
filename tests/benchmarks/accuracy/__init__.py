"""How far the predictor is off on the shared measurements, compared with its peers and goals.

One *table* is what one kernel took on one device: device, framework and version, kernel, number
format, variant and phase, the points of one operator. Each question leaves some of its points out
by a seed, trains on the others and queries those left out.
"""
