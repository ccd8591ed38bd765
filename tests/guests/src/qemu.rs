//! A running guest.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::{Guest, GuestError, GuestOutcome, Kernel, Link};

/// Exit code of `timeout` if the time limit was reached.
const TIMED_OUT: i32 = 124;
/// Seconds between SIGTERM and SIGKILL.
const KILL_AFTER: &str = "5";
/// Options of QEMU. Processors are emulated, since a test machine may not support virtualisation.
const MACHINE: [&str; 14] = [
    "-machine",
    "q35",
    "-accel",
    "tcg,thread=multi",
    "-cpu",
    "max",
    "-nodefaults",
    "-no-user-config",
    "-no-reboot",
    "-nographic",
    "-serial",
    "stdio",
    "-monitor",
    "none",
];

/// A running guest with its command. It is killed when this is dropped.
#[derive(Debug)]
pub struct Running {
    qemu: Option<Child>,
    /// Folder that host and guest share: the command and its results.
    job: TempDir,
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn job_script(guest: &Guest, command: &[&str]) -> String {
    let words: Vec<String> = command.iter().map(|word| quoted(word)).collect();
    format!("cd {} || exit 126\nexec {}\n", quoted(&guest.folder.display().to_string()), words.join(" "))
}

fn shared(path: &Path, tag: &str, options: &str) -> String {
    format!("local,path={},mount_tag={tag},security_model=none{options}", path.display())
}

impl Running {
    pub(crate) fn start(guest: &Guest, kernel: &Kernel, command: &[&str]) -> Result<Self, GuestError> {
        let system = |what| move |error| GuestError::System(what, error);
        let job =
            tempfile::Builder::new().prefix("aquifer-guest-").tempdir().map_err(system("create a folder"))?;
        fs::write(job.path().join("job.sh"), job_script(guest, command))
            .map_err(system("write the command"))?;
        let console = fs::File::create(job.path().join("console")).map_err(system("write the console"))?;
        let errors = console.try_clone().map_err(system("write the console"))?;
        let start = crate::workspace().join("tests/guests/guest/start");
        let append = format!(
            "console=ttyS0 quiet panic=-1 mitigations=off tsc=unstable aquifer.start={} \
                aquifer.modules={} aquifer.workspace={} aquifer.address={} aquifer.link={}",
            start.display(),
            kernel.modules()?.display(),
            crate::workspace().display(),
            guest.address,
            if guest.link == Link::None { "no" } else { "yes" }
        );
        let mut qemu = Command::new("timeout");
        qemu.args(["-k", KILL_AFTER, &guest.time_limit.as_secs().to_string(), "qemu-system-x86_64"])
            .args(MACHINE);
        qemu.args(["-m", &format!("{}M", guest.memory_mib), "-smp", &guest.processors.to_string()]);
        qemu.arg("-kernel")
            .arg(kernel.image())
            .arg("-initrd")
            .arg(kernel.initrd())
            .args(["-append", &append]);
        qemu.args(["-virtfs", &shared(Path::new("/"), "host", ",readonly=on,multidevs=remap")]);
        qemu.args(["-virtfs", &shared(job.path(), "job", "")]);
        if let Link::Pair { own, other } = &guest.link {
            let netdev = format!(
                "dgram,id=link,local.type=unix,local.path={},remote.type=unix,remote.path={}",
                own.display(),
                other.display()
            );
            let device =
                format!("virtio-net-pci,netdev=link,mac=52:54:00:09:00:{:02x}", guest.address.octets()[3]);
            qemu.args(["-netdev", &netdev, "-device", &device]);
        }
        qemu.stdin(Stdio::null()).stdout(console).stderr(errors);
        let qemu = qemu.spawn().map_err(system("start qemu-system-x86_64"))?;
        Ok(Self { qemu: Some(qemu), job })
    }

    /// Standard output of the command so far.
    #[must_use]
    pub fn stdout(&self) -> String {
        self.file("stdout")
    }

    /// Kills the machine, as a power failure does.
    pub fn kill(mut self) {
        self.end();
    }

    /// Waits for the end of the command.
    ///
    /// # Errors
    /// If the time limit was reached, or the guest ended first.
    pub fn wait(mut self) -> Result<GuestOutcome, GuestError> {
        let status = self.qemu.take().map(|mut qemu| qemu.wait());
        let exit_code = self.file("status").trim().parse().ok();
        let outcome = GuestOutcome {
            exit_code: exit_code.unwrap_or(-1),
            stdout: self.file("stdout"),
            stderr: self.file("stderr"),
            console: self.file("console"),
        };
        match (exit_code, status) {
            (Some(_), _) => Ok(outcome),
            (None, Some(Ok(status))) if status.code() == Some(TIMED_OUT) => {
                Err(GuestError::TimedOut(Box::new(outcome)))
            }
            (None, _) => Err(GuestError::Crashed(Box::new(outcome))),
        }
    }

    fn file(&self, name: &str) -> String {
        let bytes = fs::read(self.job.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn end(&mut self) {
        let Some(mut qemu) = self.qemu.take() else { return };
        // `timeout` forwards the signal to QEMU.
        if let Some(pid) = i32::try_from(qemu.id()).ok().and_then(rustix::process::Pid::from_raw) {
            let _gone = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _status = qemu.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}
