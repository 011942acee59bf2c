"""Attention and experts on devices of their own: the time of steps that go to and fro in parts.

While the experts compute one micro-batch, attention computes another, and a third is on the way.
With the times a of attention, e of the experts and c of one way for one micro-batch in one layer,
a micro-batch is through a layer after a + e + 2 c. A layer of all m takes that, or m times the
longest of a, e and c where they are enough to keep its devices busy; the last micro-batch comes out
m - 1 times the longest after the first. Where m longest >= a + e + 2 c this is the time of
MegaScale-Infer's ping-pong pipeline (arXiv 2504.02263): (a + e + 2 c) + longest (m L - 1) over L
layers.
Step-3 (arXiv 2507.19427) overlaps the same stages. Each micro-batch reads its weights anew;
attention over contexts is counted as in one batch, as close to linear in sequences.
"""

import numpy as np

from foretoken.domain.units import Quantity
from foretoken.simulator.grid import Ints


def count_micro_batches(num_tokens: Quantity, most: int) -> Ints:
    """Return in how many parts engines of so many tokens each go to experts apart; 0 is one."""
    parts: Ints = np.where((num_tokens >= most) & (most > 0), most, 1).astype(np.int64)
    return parts


def together_us(
    own_us: Quantity,
    experts_us: Quantity,
    sent_us: Quantity,
    num_parts: Quantity,
    num_layers: Quantity,
) -> Quantity:
    """Return the time of steps by that of all attention, all experts and all ways, there and back.

    Of one part it is their sum.
    """
    longest_us = np.maximum(np.maximum(own_us, experts_us), sent_us / 2)
    through_us = (own_us + experts_us + sent_us) / num_parts
    layers_us = np.maximum(longest_us, through_us) * (num_layers - 1)
    last_us = longest_us * (num_parts - 1) / num_parts + through_us
    return (layers_us + last_us) / num_layers
