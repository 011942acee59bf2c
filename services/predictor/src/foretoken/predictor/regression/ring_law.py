"""What physics says of a collective's latency: steps around a ring, and bytes over a link.

A ring of n ranks takes n - 1 steps, each at least as long as a message needs to get under way, and
carries its bytes at the link's rate. Between few groups of ranks this law tells what a group that
nobody measured will do; what it leaves over changes slowly with size and group.
"""

from dataclasses import dataclass

import numpy as np

from foretoken.predictor.features import Design, Matrix
from foretoken.predictor.regression.light_imports import fit_not_negative
from foretoken.predictor.roofline import FloatColumn, IntColumn

# Latency grows with the bytes over the links (flat bus bandwidth) and with the whole message
# (every rank touches all of it). Few groups cannot tell the two apart; the second has to earn its
# place. Source: cross-validated on NCCL groups of 2, 4 and 8 left out; 0.03 to 0.1 do alike.
_WHOLE_MESSAGE, _WHOLE_MESSAGE_PENALTY = 3, 0.1
# How much of one link class' efficiency is believed of the other where only one was measured: in
# the middle between all and none, as the tables with both classes do not agree on either. Of
# collectives measured with both, that leaves the log of latency about one off.
_OTHER_LINK_SHARE, _OTHER_LINK_WIDTH_LOG = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class RingLaw:
    """Latency as a sum of terms, none negative; one row of coefficients per class of links.

    Rows: groups inside a node, groups across nodes. Columns: see `_terms`. A class that was not
    measured has zeros and takes `other_log`, the log of latency over base, instead.
    """

    coefficients: Matrix
    other_log: float

    def log_ratio(self, design: Design) -> FloatColumn:
        """Return log(latency / base) of every call."""
        coefficients = self.coefficients[_link_class(design)]
        latency_us = (_terms(design) * coefficients).sum(axis=1)
        is_known = latency_us > 0.0
        ratio = np.where(is_known, latency_us, design.base_us) / design.base_us
        return np.where(is_known, np.log(ratio), self.other_log)

    def doubt_log(self, design: Design) -> FloatColumn:
        """Return the standard deviation of the law's log where its class was not measured, else 0.

        What the law leaves over where it was measured is not the law's to say.
        """
        is_known = (self.coefficients > 0.0).sum(axis=1)[_link_class(design)] > 0
        return np.where(is_known, 0.0, _OTHER_LINK_WIDTH_LOG)


def fit_ring_law(design: Design, log_ratio: FloatColumn) -> RingLaw:
    """Fit the terms to relative errors, each class of links for itself."""
    latency_us = design.base_us * np.exp(log_ratio)
    link_classes = _link_class(design)
    terms = _terms(design) / latency_us[:, None]
    coefficients = np.zeros((2, terms.shape[1]))
    for link_class in np.unique(link_classes):
        coefficients[link_class] = _fit(terms[link_classes == link_class])
    return RingLaw(coefficients, _OTHER_LINK_SHARE * float(np.median(log_ratio)))


def _fit(terms: Matrix) -> FloatColumn:
    # Terms are scaled alike, so that one penalty fits series of any length and unit.
    scale = np.sqrt((terms**2).sum(axis=0)) + np.finfo(float).tiny
    penalty = np.zeros(terms.shape[1])
    penalty[_WHOLE_MESSAGE] = _WHOLE_MESSAGE_PENALTY
    rows = np.vstack([terms / scale, np.diag(penalty)])
    wanted = np.concatenate([np.ones(len(terms)), np.zeros(terms.shape[1])])
    return np.asarray(fit_not_negative(rows, wanted) / scale)


def _link_class(design: Design) -> IntColumn:
    """Return 0 for groups inside a node, 1 for groups across nodes."""
    return (design.points[:, 2] > 1).astype(np.int64)


def _terms(design: Design) -> Matrix:
    """Return start, steps, bytes over links, the whole message, and its square root.

    The square root stands for protocols that trade latency for rate as messages grow.
    """
    num_ranks = design.points[:, 1] * design.points[:, 2]
    steps = num_ranks - 1.0
    whole_us = design.roofline_us * num_ranks / np.maximum(steps, 1.0)
    start = np.ones(design.num_rows)
    return np.column_stack(
        [start, steps, design.roofline_us, whole_us, np.sqrt(design.roofline_us)]
    )
