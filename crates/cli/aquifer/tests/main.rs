//! The command line: clusters on this machine, and under systemd.

mod cluster;
mod foreign;
mod systemd;
