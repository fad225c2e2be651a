"""What is kept between steps and requests: cache blocks, the prefixes they hold, and encoded images."""
