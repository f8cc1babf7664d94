"""What Lightning users ordinarily write, each in every layout against one plain process."""
