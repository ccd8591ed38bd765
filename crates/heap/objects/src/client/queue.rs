//! Asynchronous operations on a heap: a program begins operations, and polls for their completions
//! later. A thread of the queue carries them out.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_fabric::wake::WakeFd;
use parking_lot::{Condvar, Mutex};

use super::{ClientError, DirectRead, HeapClient};
use crate::pointer::Pointer;

/// Most operations that were begun and whose completions were not polled.
pub const QUEUE_DEPTH: usize = 1024;
/// Most reads in flight together.
const BATCH_MAX: usize = 64;

/// An operation of a queue. Each does what the method of [`HeapClient`] with its name does.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Allocates an object of this many bytes.
    Allocate(u32),
    /// Allocates an object with these bytes.
    Create(Vec<u8>),
    /// Frees an object.
    Free(Pointer),
    /// Reads the first bytes of an object.
    Get(Pointer, usize),
    /// Replaces the first bytes of an object.
    Write(Pointer, Vec<u8>),
    /// Replaces all pointers to an object by one that names its present block.
    Release(Pointer),
}

/// The completion of an operation.
#[derive(Debug)]
pub struct OperationCompletion {
    /// The id that [`HeapQueue::begin`] returned.
    pub id: u64,
    /// The output, or the error.
    pub result: Result<OperationOutput, ClientError>,
}

/// The output of a successful operation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OperationOutput {
    /// The pointer of the object, corrected.
    pub pointer: Pointer,
    /// Whether the pointer of a write names an old block, which can be released.
    pub is_old: bool,
    /// The bytes that were read.
    pub bytes: Vec<u8>,
}

/// A queue of operations on one heap. They are carried out in the order in which they were begun,
/// and consecutive reads together.
#[derive(Debug)]
pub struct HeapQueue {
    shared: Arc<QueueShared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct QueueShared {
    state: Mutex<QueueState>,
    /// Notified when an operation is begun, and at the end.
    begun: Condvar,
    /// Notified when an operation has ended.
    ended: Condvar,
    /// Readable while there are completions.
    wake: WakeFd,
}

#[derive(Debug, Default)]
struct QueueState {
    begun: VecDeque<(u64, Operation)>,
    ended: VecDeque<OperationCompletion>,
    /// The id of the next operation.
    next: u64,
    /// Number of operations whose completions were not polled.
    count: usize,
    is_over: bool,
}

impl HeapQueue {
    /// Creates a queue of operations on the heap of a client.
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub fn new(client: HeapClient) -> io::Result<Self> {
        let shared = Arc::new(QueueShared {
            state: Mutex::default(),
            begun: Condvar::new(),
            ended: Condvar::new(),
            wake: WakeFd::new()?,
        });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("heap-queue".into()).spawn(move || own.run(client))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Begins an operation. Returns its id.
    ///
    /// # Errors
    /// The operation, if [`QUEUE_DEPTH`] completions were not polled.
    pub fn begin(&self, operation: Operation) -> Result<u64, Operation> {
        let mut state = self.shared.state.lock();
        if state.count >= QUEUE_DEPTH {
            return Err(operation);
        }
        let id = state.next;
        state.next += 1;
        state.count += 1;
        state.begun.push_back((id, operation));
        drop(state);
        self.shared.begun.notify_one();
        Ok(id)
    }

    /// Returns the next completion, if there is one.
    #[must_use]
    pub fn poll(&self) -> Option<OperationCompletion> {
        let mut state = self.shared.state.lock();
        let end = state.ended.pop_front()?;
        state.count -= 1;
        if state.ended.is_empty() {
            self.shared.wake.clear();
        }
        Some(end)
    }

    /// Waits for a completion; `None` after `timeout`, or at once if no operation is in progress.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<OperationCompletion> {
        let must_wait = |state: &mut QueueState| state.ended.is_empty() && state.count > 0;
        let _late = self.shared.ended.wait_while_for(&mut self.shared.state.lock(), must_wait, timeout);
        self.poll()
    }
}

impl AsFd for HeapQueue {
    /// A descriptor that is readable while there are completions.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }
}

impl Drop for HeapQueue {
    /// Ends the queue. Operations that were not begun by the thread are discarded.
    fn drop(&mut self) {
        self.shared.state.lock().is_over = true;
        self.shared.begun.notify_one();
        let ended = self.thread.take().map(JoinHandle::join);
        debug_assert!(ended.is_none_or(|ended| ended.is_ok()), "the thread of a queue panicked");
    }
}

impl QueueShared {
    fn run(&self, mut client: HeapClient) {
        while let Some(operations) = self.next_operations() {
            let ends = carry_out(&mut client, operations);
            let mut state = self.state.lock();
            state.ended.extend(ends);
            self.wake.wake();
            drop(state);
            self.ended.notify_all();
        }
    }

    /// Waits for operations. Returns the first, or all reads that follow each other; `None` at the
    /// end.
    fn next_operations(&self) -> Option<Vec<(u64, Operation)>> {
        let mut state = self.state.lock();
        self.begun.wait_while(&mut state, |state| state.begun.is_empty() && !state.is_over);
        if state.is_over {
            return None;
        }
        let is_get = |(_, operation): &&(u64, Operation)| matches!(operation, Operation::Get(..));
        let gets = state.begun.iter().take_while(is_get).count().min(BATCH_MAX);
        Some(state.begun.drain(..gets.max(1)).collect())
    }
}

/// Carries out operations: one, or several reads.
fn carry_out(client: &mut HeapClient, mut operations: Vec<(u64, Operation)>) -> Vec<OperationCompletion> {
    if operations.len() > 1
        && let Some(ends) = get_all(client, &operations)
    {
        return ends;
    }
    let carry_out = |(id, operation)| OperationCompletion { id, result: carry_out_one(client, operation) };
    operations.drain(..).map(carry_out).collect()
}

/// Reads objects side by side; `None` if one cannot be read, and all must be read by themselves.
fn get_all(client: &mut HeapClient, gets: &[(u64, Operation)]) -> Option<Vec<OperationCompletion>> {
    let get = |(id, operation): &(u64, Operation)| match operation {
        Operation::Get(pointer, len) => Some((*id, *pointer, vec![0; *len])),
        _ => None,
    };
    let mut gets = gets.iter().map(get).collect::<Option<Vec<_>>>()?;
    let mut reads: Vec<DirectRead<'_>> =
        gets.iter_mut().map(|(_, pointer, bytes)| DirectRead::new(*pointer, bytes)).collect();
    client.get_many(&mut reads).ok()?;
    let pointers: Vec<Pointer> = reads.into_iter().map(|read| read.pointer).collect();
    let end = |((id, _, bytes), pointer)| OperationCompletion {
        id,
        result: Ok(OperationOutput { pointer, is_old: false, bytes }),
    };
    Some(gets.into_iter().zip(pointers).map(end).collect())
}

fn carry_out_one(client: &mut HeapClient, operation: Operation) -> Result<OperationOutput, ClientError> {
    let (mut is_old, mut bytes) = (false, Vec::new());
    let pointer = match operation {
        Operation::Allocate(bytes) => client.allocate(bytes)?,
        Operation::Create(contents) => client.create(&contents)?,
        Operation::Free(pointer) => {
            client.free(pointer)?;
            pointer
        }
        Operation::Get(mut pointer, len) => {
            bytes = vec![0; len];
            client.get(&mut pointer, &mut bytes)?;
            pointer
        }
        Operation::Write(mut pointer, contents) => {
            is_old = client.write(&mut pointer, &contents)?;
            pointer
        }
        Operation::Release(mut pointer) => {
            client.release(&mut pointer)?;
            pointer
        }
    };
    Ok(OperationOutput { pointer, is_old, bytes })
}
