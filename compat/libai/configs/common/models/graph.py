"""LiBai's choice between graph and eager mode, which is none here."""

graph = dict(enabled=True, debug=-1, auto_parallel=dict(enabled=False), train_graph=dict(), eval_graph=dict())
