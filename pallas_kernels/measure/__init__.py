"""What the kernels cost and whether they are right: on this CPU, compiled for chips, on a device."""
