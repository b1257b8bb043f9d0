"""Everything that knows Lightning: its own loop driven for the sweep, the rest of the Trainer muted, all put back."""
