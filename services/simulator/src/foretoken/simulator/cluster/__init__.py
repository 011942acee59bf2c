"""Clusters: pools of engines, routers, autoscalers, KV transfers and failures."""
