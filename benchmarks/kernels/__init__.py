"""What the kernels cost: on this CPU, compiled for chips, on a device beside other libraries."""
