//! Sets `AQUIFER_RUSTC` to the compiler's version, on which the memory layout of types depends.

use std::process::Command;

fn main() {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("--version").output();
    let version = output.ok().and_then(|output| String::from_utf8(output.stdout).ok());
    println!("cargo::rustc-env=AQUIFER_RUSTC={}", version.as_deref().unwrap_or("rustc, unknown").trim());
    println!("cargo::rerun-if-changed=build.rs");
}
