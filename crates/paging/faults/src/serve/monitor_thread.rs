//! The thread of a program, which runs its monitor.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use aquifer_channel::try_send_frame;
use aquifer_ipc::Frame;

use super::attach::AttachError;
use super::attachment::{Attachment, shut_down};
use super::edge::ProcessEdge;
use super::interrupt;
use super::priority::{URGENT, set_niceness};
use super::process::UnprovenProcess;
use super::program::{MonitorRequest, Program, remove_program};
use super::run::Run;
use crate::monitor::{Monitor, TurnOutcome};

/// Maximum interval of the checks that the memory of an unknown process, or of one without a
/// worker, still exists.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Time from the end of a worker to the first check that the memory still exists. It doubles up to
/// [`PROBE_INTERVAL`].
const FIRST_PROBE: Duration = Duration::from_millis(1);
/// Pause after a program has changed its userfaultfd.
const POLL_ERROR_PAUSE: Duration = Duration::from_millis(5);
/// Number of yields before the monitor sleeps: two are cheaper than a sleep and a wake-up.
const YIELDS_BEFORE_SLEEP: u32 = 2;

/// Starts the thread of a program.
///
/// The thread first makes the monitor with `make`, which returns `None` if the program has ended.
pub(crate) fn spawn(
    run: &Arc<Run>,
    program: &Arc<Program>,
    edge: ProcessEdge,
    make: impl FnOnce(&Arc<Run>, &Arc<Program>, ProcessEdge) -> Option<Monitor<ProcessEdge>> + Send + 'static,
) -> io::Result<()> {
    let name = format!("faults-{}", program.pid());
    let (run, program) = (Arc::clone(run), Arc::clone(program));
    let serve = move || {
        set_niceness(URGENT);
        program.thread.store(interrupt::this_thread(), SeqCst);
        if let Some(monitor) = make(&run, &program, edge) {
            MonitorLoop {
                monitor,
                program: Arc::clone(&program),
                outlived: None,
                next_probe: Instant::now() + FIRST_PROBE,
            }
            .run();
        }
        program.thread.store(0, SeqCst);
        remove_program(&run, &program);
    };
    std::thread::Builder::new().name(name).spawn(serve).map(drop)
}

/// The loop of a program's thread.
struct MonitorLoop {
    monitor: Monitor<ProcessEdge>,
    program: Arc<Program>,
    /// Interval between checks of the memory, if the process or the worker has ended and the memory
    /// still exists.
    outlived: Option<Duration>,
    /// The time of the next check of the memory.
    next_probe: Instant,
}

impl MonitorLoop {
    fn run(mut self) {
        let mut served = 0;
        let mut yields = 0;
        loop {
            self.handle_requests();
            let next = self.monitor.turn();
            let faults = self.program.stats.faults.load(Relaxed);
            if faults != served {
                served = faults;
                yields = 0;
            }
            // Must be published before the sleep, for programs that need blocks or pages of this
            // one.
            let volume = self.monitor.volume();
            self.program.held.store(volume.held(), Relaxed);
            self.program.owns_blocks.store(volume.owns_blocks(), SeqCst);
            self.program.waits_in_mempool.store(volume.waits_in_mempool(), Relaxed);
            match next {
                TurnOutcome::Again => {}
                // The program was just woken on this core and may fault again at once.
                TurnOutcome::Sleep if served > 0 && yields < YIELDS_BEFORE_SLEEP => {
                    yields += 1;
                    std::thread::yield_now();
                }
                TurnOutcome::Sleep => self.sleep(),
                TurnOutcome::Ended => break,
            }
        }
        self.end();
    }

    fn handle_requests(&mut self) {
        for request in self.program.drain_requests() {
            match request {
                MonitorRequest::Areas(areas) => self.monitor.adopt(areas),
                MonitorRequest::Attach(attachment, process) => self.attach(*attachment, process),
            }
        }
    }

    /// Attaches the worker of a forked child, or refuses the child, so that it ends.
    fn attach(&mut self, attachment: Attachment, process: UnprovenProcess) {
        let (reply_to, pid) = (attachment.socket.try_clone(), process.pid());
        let Err(error) = self.try_attach(attachment, process) else { return };
        tracing::warn!(%error, pid, "cannot attach a forked program");
        let refusal = Frame::Refused(format!("the agent cannot attach a forked process: {error}"));
        if let Err(error) = reply_to.and_then(|socket| try_send_frame(&socket, &refusal, &[])) {
            tracing::debug!(%error, "cannot send the refusal: the program has ended");
        }
    }

    fn try_attach(&mut self, attachment: Attachment, process: UnprovenProcess) -> Result<(), AttachError> {
        let program = &self.program;
        if program.is_attached.load(SeqCst) && self.monitor.edge().is_attached() {
            return Err(AttachError::UnknownChild);
        }
        match program.process() {
            None => self.monitor.edge().identify_child(process)?,
            Some(known) if known.pid() == process.pid() => {}
            Some(_) => return Err(AttachError::UnknownChild),
        }
        self.program.attached(&attachment.hello);
        self.monitor.edge().attach(attachment)
    }

    /// Sleeps until the kernel, the sender, another thread or the program's end wakes it.
    fn sleep(&mut self) {
        self.program.has_pending_faults.store(self.monitor.has_pending_faults(), SeqCst);
        if !self.program.begin_sleep() {
            self.handle_end();
            return;
        }
        let edge = self.monitor.edge();
        let mut fds = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; 2];
        fds[0].fd = edge.uffd().as_raw_fd();
        fds[1].fd = self.program.wakeup.as_raw_fd();
        // The exit watcher does not know an unknown process, so the memory is checked at intervals.
        let interval = self.outlived.or((self.program.pid() == 0).then_some(PROBE_INTERVAL));
        let timeout_ms = interval.map_or(-1, |interval| i32::try_from(interval.as_millis()).unwrap_or(-1));
        // SAFETY: the array has two valid entries.
        unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout_ms) };
        self.program.end_sleep();
        if fds[0].revents & libc::POLLERR != 0 {
            // A process that has the descriptor, too, has made it blocking.
            edge.uffd().make_nonblocking();
            std::thread::sleep(POLL_ERROR_PAUSE);
        }
        if fds[1].revents != 0 {
            self.program.drain_wakeup();
        }
        if !self.handle_end()
            && let Some(interval) = interval
            && Instant::now() >= self.next_probe
        {
            // Other threads may wake the monitor often, so the time is checked, too.
            self.next_probe = Instant::now() + interval;
            self.probe();
        }
    }

    /// Handles the end of the process or of its worker. Returns whether the worker has ended.
    fn handle_end(&mut self) -> bool {
        if self.program.has_process_ended.swap(false, SeqCst) {
            self.monitor.edge().report_process_end();
            // The monitor checks the memory, too, because the program may prevent its worker from
            // reporting.
            self.outlived = Some(self.outlived.unwrap_or(FIRST_PROBE));
        }
        let has_exited = self.program.has_exited();
        if has_exited {
            self.worker_has_ended();
        }
        has_exited
    }

    /// Ends the monitor if the memory is gone, is not needed, or must not be served any more.
    ///
    /// Otherwise the kernel may not have freed the memory yet, or another process may share it,
    /// made by `clone` with `CLONE_VM` or by `vfork`, which the worker could not detect. Then the
    /// memory is served further, and no page is evicted from it.
    fn worker_has_ended(&mut self) {
        let edge = self.monitor.edge();
        if self.program.is_killed() || edge.is_worker_last() || !edge.is_alive() {
            return self.monitor.end();
        }
        edge.end_run_if_worker_failed();
        self.program.has_exited.store(false, SeqCst);
        self.monitor.edge().detach();
        self.outlived = Some(self.outlived.unwrap_or(FIRST_PROBE));
    }

    /// Ends the monitor if the memory of an unknown process, or of one without a worker, is gone.
    fn probe(&mut self) {
        self.outlived = self.outlived.map(|interval| (interval * 2).min(PROBE_INTERVAL));
        if self.program.is_killed() || !self.monitor.edge().is_alive() {
            self.monitor.end();
        }
    }

    /// Frees all memory of the program.
    fn end(mut self) {
        let id = self.program.id;
        if self.program.has_exited() && !self.program.is_killed() {
            self.monitor.edge().end_run_if_worker_failed();
        }
        self.monitor.edge().run().sender.abandon(id);
        let socket = self.monitor.edge().worker_socket();
        self.monitor.close();
        // Must come after the close, because children may need pages of the staging buffers.
        socket.iter().for_each(shut_down);
        self.program.held.store(0, Relaxed);
    }
}
