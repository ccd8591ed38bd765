//! demo
use crate::bench::BenchError;
use std::process::ExitCode;
/// x
#[derive(clap::Args, Clone, Debug)]
pub struct DemoArgs {}
/// x
pub fn run(_: &DemoArgs) -> Result<ExitCode, BenchError> { Ok(ExitCode::SUCCESS) }
