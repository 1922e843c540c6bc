"""What several test folders use: trained runs, images, a server that misbehaves."""
