//! Accounts that outlive the machine on which they are.
//!
//! Usage: `ledger NAME ID COPIES [PAYMENTS]`. A cluster must run whose nodes have memory for heaps
//! (`aquifer up --heap-memory SIZE`).
//!
//! The accounts are in segment ID. After each hundred payments they are synced to COPIES memory
//! nodes, and only then are the payments confirmed (printed). If the process dies, the next one of
//! its name goes back to the last sync. If its machine dies, a process on any other one restores
//! the accounts. Either finds each payment that was confirmed, and the money adds up.

use std::error::Error;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_client::segments::{self, CopyError, Process, Pulling};
use aquifer_containers::{OrderedMap, Owned, migratable};

const SEGMENT_BYTES: u64 = 16 << 20;
const ACCOUNTS: u64 = 10_000;
/// The balance of each account at first.
const GIFT: u64 = 100;
/// Payments between two syncs.
const PAYMENTS_AT_ONCE: u64 = 100;
/// How long a machine may be away before its segments can be restored elsewhere.
const PATIENCE: Duration = Duration::from_secs(120);

migratable! {
    /// Accounts by number, and how many payments were made.
    #[derive(Debug)]
    pub struct Ledger: 1 {
        payments: u64,
        accounts: OrderedMap<u64, u64>,
    }
}

impl Ledger {
    /// Moves money from one account to another one.
    fn pay(&mut self, from: u64, to: u64, amount: u64) {
        let source = self.accounts.get_mut(&from).expect("there is one");
        let amount = amount.min(*source);
        *source -= amount;
        // If the process dies here, the money is gone, but not from what was synced.
        *self.accounts.get_mut(&to).expect("there is one") += amount;
        self.payments += 1;
    }

    fn check(&self) -> Result<(), String> {
        let sum: u64 = self.accounts.iter().map(|(_, balance)| balance).sum();
        if sum == ACCOUNTS * GIFT { Ok(()) } else { Err(format!("{sum} instead of {}", ACCOUNTS * GIFT)) }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or("usage: ledger NAME ID COPIES [PAYMENTS]");
    let (name, id, copies) = (next()?, next()?.parse()?, next()?.parse()?);
    let payments = arguments.next().map_or(Ok(u64::MAX), |text| text.parse())?;

    let process = Process::open(&name)?;
    let mut ledger = open(&process, id)?;
    ledger.check()?;
    println!("opened with {} payments", ledger.payments);
    let mut random = SystemTime::now().duration_since(UNIX_EPOCH)?.subsec_nanos().into();
    while ledger.payments < payments {
        for _ in 0..PAYMENTS_AT_ONCE {
            let (from, to) = (number(&mut random) % ACCOUNTS, number(&mut random) % ACCOUNTS);
            ledger.pay(from, to, number(&mut random) % GIFT);
        }
        ledger.sync(copies)?;
        println!("{} payments", ledger.payments);
    }
    ledger.check()?;
    // SAFETY: nothing was moved out of the segment.
    unsafe { ledger.deallocate()? };
    Ok(())
}

/// The accounts that an earlier process of this name has left, or that another machine had, or new
/// ones.
fn open(process: &Process, id: u64) -> Result<Owned<'_, Ledger>, Box<dyn Error>> {
    let found = match process.receive(Pulling::Ahead, Duration::ZERO)? {
        Some(mut segment) => match segment.revert() {
            Ok(()) => Ok(segment),
            // It was never synced.
            Err(error @ segments::Error::Copies(CopyError::None)) => segment.deallocate().and(Err(error)),
            // A part of it was on a machine that has died.
            Err(_) => segment.give_up().and_then(|()| process.restore(id, PATIENCE)),
        },
        None => process.restore(id, PATIENCE),
    };
    match found {
        // No payment was confirmed.
        Err(segments::Error::Copies(CopyError::None)) => {}
        found => return Ok(Owned::open(found?)?),
    }
    Ok(Owned::create(process, id, SEGMENT_BYTES, |allocator| {
        let mut accounts = OrderedMap::new(allocator);
        for account in 0..ACCOUNTS {
            accounts.insert(account, GIFT)?;
        }
        Ok(Ledger { payments: 0, accounts })
    })?)
}

/// A random number (xorshift).
fn number(state: &mut u64) -> u64 {
    *state |= 1;
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state >> 20
}
