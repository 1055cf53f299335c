"""Measures a model of PyTorch, Flax or Equinox while it trains.

`rank_collapse.torch.watch` is the public place for PyTorch. Its files, in the order to read them:

- `torch_watch`: which steps are measured, and the row of each; `torch_models`: which models can be
  watched, and which of their attentions are numbered.
- `torch_passes`: which modules and which functions of torch run in a measured step.
- `torch_hidden`: attentions where torch hides values; `torch_arrivals`: whether the gradients of a
  pass were dropped.
- `torch_call_masks`: which mask of the call says which tokens of an attention exist.
- `torch_runs`: the attentions among them, each with the scalars of its tokens and of its weights;
  `torch_frames` has the modules that run, `torch_pieces` the single products of a run.
- `torch_tokens`: the tokens that the queries of an attention are made of.
- `torch_origins`: the `Tag` of each tensor, recorded from the functions that run. `torch_tags` and
  `torch_tag_table` define tags, `torch_followers` the numbers that move with a tensor,
  `torch_functions` the functions of torch.
- `torch_maps`, `torch_scores`, `torch_weights`: linear maps, products of queries and keys, and
  weights where they meet values; `torch_masks`: the masks among the functions.
- `torch_products`: the weights of an attention, its masks, documents in packed rows, and scalars.
- `torch_gradients`: norms of the gradients of queries, keys and values.
- `recorder`: rows, alarms and logs; `names`: how projections are called, for JAX.
"""
