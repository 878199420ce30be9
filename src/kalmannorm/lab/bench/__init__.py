"""`kalmannorm bench`: times of norms and of their alternatives, as ratios within one run. Results are checked first.

    step        a training step of a model, compared with the same network and nn.BatchNorm2d; `step_contenders`,
                `step_checks`
    op          one norm, forward and backward, over shapes and layouts; `op_contenders`, `truth`
    inference   one norm, or with `inference_model` a whole network, as it is deployed

Shared: `turns` (contenders take turns; ratios, spread), `timing` (one timed call, direct or as a CUDA graph),
`comparing` (one norm: check, time, count), `copying` (the speed of memory), `output` and `chart`.
"""
