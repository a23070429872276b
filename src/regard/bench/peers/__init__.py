"""What stands beside Regard: imported only where it is measured."""
