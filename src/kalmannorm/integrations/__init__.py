"""kalmannorm inside other libraries. Each module imports the library of its name, and nothing else imports the module.

`timm`: `norm_layer=`. `monai`: `norm="kalman"`. `lightning` and `transformers`: callbacks for their trainers.
"""
