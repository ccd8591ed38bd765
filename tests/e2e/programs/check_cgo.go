package main

// #include <stdlib.h>
import "C"

// A use of libc, so that the program is linked with it.
var _ = C.EXIT_SUCCESS
