//! A program that gives rights up must not keep a thread that has them: the worker, which libc does not know, follows.

use core::ffi::c_int;
use core::mem::transmute;
use core::sync::atomic::{AtomicU32, Ordering};

use libc::{gid_t, size_t, uid_t};

use crate::attach;
use crate::next::{Next, fail};
use crate::raw::syscall;
use crate::say;

/// Groups that are passed on; the kernel allows more, nobody has them.
const GROUPS_MAX: usize = 1024;

/// Who a thread is.
#[repr(C)]
pub struct Credentials {
    users: [uid_t; 3],
    groups: [gid_t; 3],
    others: [gid_t; GROUPS_MAX],
    others_count: usize,
}

impl Credentials {
    /// Nobody's yet.
    pub const NONE: Self = Self { users: [0; 3], groups: [0; 3], others: [0; GROUPS_MAX], others_count: 0 };

    /// The calling thread's. `None` if it has too many groups.
    fn of_this_thread() -> Option<Self> {
        let mut found = Self::NONE;
        let addresses = |ids: &mut [u32; 3]| ids.each_mut().map(|id| core::ptr::from_mut(id) as usize);
        let ([r, e, s], [rg, eg, sg]) = (addresses(&mut found.users), addresses(&mut found.groups));
        // SAFETY: the kernel writes into the places named, which are large enough.
        let count = unsafe {
            syscall(libc::SYS_getresuid, [r, e, s, 0, 0, 0]);
            syscall(libc::SYS_getresgid, [rg, eg, sg, 0, 0, 0]);
            syscall(libc::SYS_getgroups, [GROUPS_MAX, found.others.as_mut_ptr() as usize, 0, 0, 0, 0])
        };
        found.others_count = usize::try_from(count).ok()?;
        Some(found)
    }

    /// Make them the calling thread's; false if that cannot be.
    pub fn assume(&self) -> bool {
        let [user, effective, saved] = self.users.map(|id| id as usize);
        let [group, effective_group, saved_group] = self.groups.map(|id| id as usize);
        // SAFETY: changes who this thread is, and no memory. The other groups may be the same already, when there is no right to set
        // them any more.
        unsafe {
            syscall(libc::SYS_setgroups, [self.others_count, self.others.as_ptr() as usize, 0, 0, 0, 0]);
            syscall(libc::SYS_setresgid, [group, effective_group, saved_group, 0, 0, 0]) == 0
                && syscall(libc::SYS_setresuid, [user, effective, saved, 0, 0, 0]) == 0
        }
    }
}

/// 1 while a thread has the worker follow: one at a time.
static BUSY: AtomicU32 = AtomicU32::new(0);

/// In a child: the thread that the worker was following, if there was one, stayed in the parent.
pub fn forget_others() {
    BUSY.store(0, Ordering::Release);
}

/// Have the worker be who the calling thread is now.
fn follow() {
    let Some(credentials) = Credentials::of_this_thread() else {
        say::fail("this program has more groups than its worker can take over", 0)
    };
    attach::attach_if_forked();
    while BUSY.swap(1, Ordering::Acquire) == 1 {
        // SAFETY: only lets others run.
        unsafe { libc::sched_yield() };
    }
    attach::have_worker_assume(credentials);
    BUSY.store(0, Ordering::Release);
}

macro_rules! stand_in {
    ($($name:ident($($argument:ident: $type:ty),*) called $text:literal,)*) => {
        $(
            /// Stands in for libc's function of this name.
            ///
            /// # Safety
            /// As of libc's.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
                static NEXT: Next = Next::new($text);
                let next = NEXT.address();
                if next.is_null() {
                    return fail(libc::ENOSYS);
                }
                // SAFETY: the next definition of this name is libc's, which has this type; the rest is passed on as it came.
                let result = unsafe {
                    transmute::<*mut core::ffi::c_void, unsafe extern "C" fn($($type),*) -> c_int>(next)(
                        $($argument),*
                    )
                };
                if result == 0 {
                    follow();
                }
                result
            }
        )*
    };
}

stand_in! {
    setuid(user: uid_t) called c"setuid",
    seteuid(user: uid_t) called c"seteuid",
    setreuid(user: uid_t, effective: uid_t) called c"setreuid",
    setresuid(user: uid_t, effective: uid_t, saved: uid_t) called c"setresuid",
    setgid(group: gid_t) called c"setgid",
    setegid(group: gid_t) called c"setegid",
    setregid(group: gid_t, effective: gid_t) called c"setregid",
    setresgid(group: gid_t, effective: gid_t, saved: gid_t) called c"setresgid",
    setgroups(count: size_t, groups: *const gid_t) called c"setgroups",
}
