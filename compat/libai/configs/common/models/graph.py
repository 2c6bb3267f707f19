"""LiBai's choice between graph and eager mode, which is none here."""

graph = dict(
    enabled=True, debug=-1, train_graph=dict(is_train=True), eval_graph=dict(is_train=False)
)
graph.auto_parallel = dict(enabled=False, enable_auto_parallel_ignore_user_sbp_config=False)
graph.auto_parallel.update(trunk_algo=True, sbp_collector=False)
