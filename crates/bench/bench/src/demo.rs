//! `aquifer demo`: runs a real program plainly, then with a quarter of its memory on the pool, then
//! with the same limit on kernel swap, and compares the outputs byte by byte.

mod picture;
mod program;
mod runs;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use aquifer::Fabric;
use aquifer::say::{say, say_line};
use aquifer_bench::BenchError;
use aquifer_bench::support::bytes::{MIB, show_bytes};
use aquifer_bench::support::cluster::Cluster;
use aquifer_bench::support::folder;
use aquifer_bench::support::interrupt;
use aquifer_swap::setup::cleanup_stale;
use clap::Args;

use program::Program;
use runs::{DemoRun, Stage};

/// The limit of the other runs is the plain run's peak divided by this.
const LIMIT_DIVISOR: u64 = 4;
/// Least memory that the nodes lend together.
const NODE_BYTES_MIN: u64 = 1 << 30;

/// Arguments of `aquifer demo`.
#[derive(Args, Clone, Debug)]
pub struct DemoArgs {
    /// File for the picture, an SVG
    #[arg(long, value_name = "FILE", default_value = "aquifer-demo.svg")]
    pub picture: PathBuf,
}

/// Runs the demo. All processes that it starts have ended when it returns.
///
/// # Errors
/// If something is not installed, the plain run or the run on the pool fails, their outputs differ,
/// or a signal asks to stop. A failure of kernel swap is shown in the table and is no error.
pub fn run(args: &DemoArgs) -> Result<ExitCode, BenchError> {
    interrupt::install();
    interrupt::outcome(play(args))
}

fn play(args: &DemoArgs) -> Result<ExitCode, BenchError> {
    if let Err(error) = cleanup_stale() {
        aquifer::say::say_error!("cleanup after an earlier demo failed: {error}");
    }
    let folder = folder::temporary()?;
    let program = Program::find(folder.path())?;
    say_line!("{}\n", program.about());
    let mut stage = Stage::new(program, folder.path().to_owned());
    let plain = stage.run(DemoRun::Plain)?;
    say_line!("{}", plain.line());
    let limit_bytes = (plain.resident_peak_bytes / LIMIT_DIVISOR / MIB).max(8) * MIB;
    say_line!("{:<12} the limit of the next runs is {}, a quarter of that peak", "", show_bytes(limit_bytes));
    let mut played = vec![plain];

    let cluster = Cluster::up(played[0].resident_peak_bytes.max(NODE_BYTES_MIN), Fabric::Shm, None)?;
    played.push(stage.run(DemoRun::Pool { cluster: &cluster, limit_bytes })?);
    drop(cluster);
    say_line!("{}", played[1].line());
    compare(folder.path(), DemoRun::POOL, &played)?;

    let swap_bytes = 2 * played[0].resident_peak_bytes;
    let mut swap = stage.run(DemoRun::Swap { limit_bytes, swap_bytes })?;
    if swap.failure.is_none()
        && let Err(error) = compare(folder.path(), DemoRun::SWAP, &played)
    {
        swap.failure = Some(error.to_string());
    }
    say_line!("{}", swap.line());
    played.push(swap);
    say_line!(
        "\nthe outputs of the plain run and of the run on the pool are equal: {}\n",
        show_bytes(played[0].output_bytes)
    );
    say!("{}", picture::table(&played));
    say!("\n{}", picture::text(&played, limit_bytes));
    picture::draw(&args.picture, &played, limit_bytes, stage.title())?;
    say_line!("\npicture: {}", args.picture.display());
    Ok(ExitCode::SUCCESS)
}

/// Compares an output with that of the plain run. If they differ, copies both to the system's
/// temporary folder.
///
/// # Errors
/// If they differ, or the plain output is empty.
fn compare(folder: &Path, run: &str, played: &[runs::Played]) -> Result<(), BenchError> {
    let path = |name: &str| folder.join(name);
    let read = |path: &Path| std::fs::read(path).map_err(BenchError::io("read", path));
    let (plain, other) = (path(DemoRun::PLAIN), path(run));
    if read(&plain)? == read(&other)? && played[0].output_bytes > 0 {
        return Ok(());
    }
    let keep = |from: &Path, name: &str| {
        let to = std::env::temp_dir().join(format!("aquifer-demo-{}-{name}.txt", std::process::id()));
        std::fs::copy(from, &to).map_err(BenchError::io("copy an output to", &to))?;
        Ok::<_, BenchError>(to)
    };
    Err(BenchError::OutputDiffers {
        context: run.into(),
        plain: keep(&plain, "plain")?,
        other: keep(&other, &run.replace(' ', "-"))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_differing_byte_is_found_and_both_outputs_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let played = [runs::Played { output_bytes: 3, ..runs::Played::default() }];
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write(DemoRun::PLAIN, "abc");
        write(DemoRun::POOL, "abc");
        assert!(compare(folder.path(), DemoRun::POOL, &played).is_ok());
        write(DemoRun::POOL, "abd");
        match compare(folder.path(), DemoRun::POOL, &played) {
            Err(BenchError::OutputDiffers { plain, other, .. }) => {
                assert_eq!(std::fs::read_to_string(&plain).unwrap(), "abc");
                assert_eq!(std::fs::read_to_string(&other).unwrap(), "abd");
                std::fs::remove_file(plain).unwrap();
                std::fs::remove_file(other).unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
}
