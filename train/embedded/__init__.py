"""The recipe of the embedded model: its data, constructed weights, training, measurements and card."""
