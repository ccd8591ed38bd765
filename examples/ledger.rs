//! Accounts that survive the loss of the machine on which they are.
//!
//! Usage: `ledger NAME ID COPIES [PAYMENTS]`. A cluster must run whose nodes have memory for heaps
//! (`aquifer up --heap-memory SIZE`).
//!
//! The accounts are in segment ID. After each hundred payments they are synced to COPIES memory
//! nodes, and only then are the payments confirmed (printed). If the process dies, the next one of
//! its name reverts the accounts to the last sync. If its machine dies, a process on any other
//! machine restores the accounts. In both cases each confirmed payment is in the accounts, and the
//! sum of all balances is right.

use std::error::Error;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_client::segments::{self, CopyError, Process, Pulling};
use aquifer_containers::{OrderedMap, Owned, migratable};

const SEGMENT_BYTES: u64 = 16 << 20;
const ACCOUNTS: u64 = 10_000;
/// The balance of each new account.
const INITIAL_BALANCE: u64 = 100;
/// Number of payments between two syncs.
const PAYMENTS_PER_SYNC: u64 = 100;
/// Time for which a restore waits for the end of the lost machine's grace time.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(120);

migratable! {
    /// The accounts by number, and the number of payments.
    #[derive(Debug)]
    pub struct Ledger: 1 {
        payments: u64,
        accounts: OrderedMap<u64, u64>,
    }
}

impl Ledger {
    /// Moves money from one account to another one.
    fn pay(&mut self, from: u64, to: u64, amount: u64) {
        let source = self.accounts.get_mut(&from).expect("the account exists");
        let amount = amount.min(*source);
        *source -= amount;
        // If the process dies here, the amount is missing, but not in the copy of the last sync.
        *self.accounts.get_mut(&to).expect("the account exists") += amount;
        self.payments += 1;
    }

    fn check(&self) -> Result<(), String> {
        let sum: u64 = self.accounts.iter().map(|(_, balance)| balance).sum();
        let expected = ACCOUNTS * INITIAL_BALANCE;
        if sum == expected { Ok(()) } else { Err(format!("the sum is {sum} instead of {expected}")) }
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
        for _ in 0..PAYMENTS_PER_SYNC {
            let (from, to) = (number(&mut random) % ACCOUNTS, number(&mut random) % ACCOUNTS);
            ledger.pay(from, to, number(&mut random) % INITIAL_BALANCE);
        }
        ledger.sync(copies)?;
        println!("{} payments", ledger.payments);
    }
    ledger.check()?;
    // SAFETY: nothing was moved out of the segment.
    unsafe { ledger.deallocate()? };
    Ok(())
}

/// Opens the accounts that an earlier process of this name has left, restores those of a lost
/// machine, or creates new ones.
fn open(process: &Process, id: u64) -> Result<Owned<'_, Ledger>, Box<dyn Error>> {
    let found = match process.receive(Pulling::Ahead, Duration::ZERO)? {
        Some(mut segment) => match segment.revert() {
            Ok(()) => Ok(segment),
            // The segment was never synced.
            Err(error @ segments::Error::Copies(CopyError::None)) => segment.deallocate().and(Err(error)),
            // Pages of the segment are lost with another machine.
            Err(_) => segment.give_up().and_then(|()| process.restore(id, RESTORE_TIMEOUT)),
        },
        None => process.restore(id, RESTORE_TIMEOUT),
    };
    match found {
        // There are no copies, so no payment was confirmed.
        Err(segments::Error::Copies(CopyError::None)) => {}
        found => return Ok(Owned::open(found?)?),
    }
    Ok(Owned::create(process, id, SEGMENT_BYTES, |allocator| {
        let mut accounts = OrderedMap::new(allocator);
        for account in 0..ACCOUNTS {
            accounts.insert(account, INITIAL_BALANCE)?;
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
