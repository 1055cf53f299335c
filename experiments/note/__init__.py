"""What is measured of Transformers beyond the paper: forms of attention, designs, tasks."""
