"""Double of Mapping: tensor parallelism."""

from __future__ import annotations


class Mapping:
    def __init__(
        self,
        world_size=1,
        rank=0,
        gpus_per_node=8,
        *,
        tp_size=1,
        pp_size=1,
        cp_size=1,
        moe_tp_size=-1,
        moe_ep_size=-1,
    ):
        assert tp_size * pp_size * cp_size == world_size
        self.world_size, self.rank, self.gpus_per_node = world_size, rank, gpus_per_node
        self.tp_size, self.pp_size, self.cp_size = tp_size, pp_size, cp_size
        self.moe_tp_size = tp_size if moe_tp_size == -1 else moe_tp_size
        self.moe_ep_size = 1 if moe_ep_size == -1 else moe_ep_size

    @classmethod
    def from_dict(cls, settings):
        return cls(**settings)

    def to_dict(self):
        return dict(self.__dict__)

    @property
    def tp_group(self):
        return list(range(self.tp_size))

    @property
    def tp_rank(self):
        return self.rank

    @property
    def pp_rank(self):
        return 0

    def pp_layers(self, count):
        return list(range(count))

    def is_first_pp_rank(self):
        return True

    def is_last_pp_rank(self):
        return True
