"""The servers in front of the replicas of a cluster: one for each that serves."""

from foretoken.simulator.engine.front_end import FrontEndRules, pass_front_end


class FrontEnds:
    """Servers that take requests in the order in which they come, each the first that is free."""

    def __init__(self, rules: FrontEndRules, num_servers: int) -> None:
        self._rules = rules
        self._free_ns = [(0, 0)] * num_servers

    def take(self, num_tokens: int, num_serving: int, now_ns: int) -> int:
        """Take a request, of so many servers that run; return when it is through."""
        running = range(max(min(num_serving, len(self._free_ns)), 1))
        place = min(running, key=self._free_ns.__getitem__)
        *free_ns, there_ns = pass_front_end(self._rules, num_tokens, now_ns, self._free_ns[place])
        self._free_ns[place] = (int(free_ns[0]), int(free_ns[1]))
        return int(there_ns)
