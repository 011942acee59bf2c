"""What kernels cost that go with blocks of queries over the keys they see, one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.domain.operators.spec.operator import Dims, FeatureFormula
from foretoken.domain.units import Quantity, ceil_divide


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryBlocks:
    """The dimensions that say how many queries there are, what they see, and by how many heads."""

    tokens: str = "q_tokens"
    pairs: str = "score_pairs"
    heads: str = "num_heads"
    head_dim: str = "head_dim"

    def costs(self, block: int, name: str = "") -> Mapping[str, FeatureFormula]:
        """Return what latency grows with by blocks of so many queries of a head.

        A kernel with other such blocks in addition says by `name` which these are.
        """

        def num_blocks(d: Dims) -> Quantity:
            of_head = ceil_divide(d[self.tokens] / d["num_seqs"], block) * d["num_seqs"]
            return of_head * d[self.heads]

        def pairs(d: Dims) -> Quantity:
            return block * d[self.pairs] / d[self.tokens] * d[self.head_dim]

        def waves(d: Dims, num_sms: int) -> Quantity:
            return ceil_divide(num_blocks(d), num_sms)

        return {
            f"{name}blocks_{block}": lambda d, _: num_blocks(d),
            f"{name}waves_{block}": waves,
            f"{name}wave_queries_{block}": lambda d, num_sms: (
                waves(d, num_sms) * block * d[self.head_dim]
            ),
            f"{name}wave_pairs_{block}": lambda d, num_sms: waves(d, num_sms) * pairs(d),
            f"{name}block_pairs_{block}": lambda d, _: num_blocks(d) * pairs(d),
        }
