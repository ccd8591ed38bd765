//! The binary `aquifer`.

fn main() -> std::process::ExitCode {
    aquifer::main()
}
