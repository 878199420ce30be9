"""`kalmannorm bench`: time beside what one would use instead, as ratios within one run, of what was checked first.

    step        a training step of a model beside the same net with nn.BatchNorm2d; `step_contenders`, `step_checks`
    op          one norm, forward and backward, over shapes and layouts; `op_contenders`, `truth`
    inference   one norm, or with `inference_model` a whole net, as it is shipped

What they share: `turns` (contenders take turns, ratios, spread), `timing` (one call as it is timed: as it is, or as a
CUDA graph), `comparing` (one norm: check, time, count), `copying` (how fast memory is here), `output` and `chart`.
"""
