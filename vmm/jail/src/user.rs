//! Who we are and what we may: groups, the user, capabilities, and that none of it comes back.
//!
//! The kernel keeps all of this for each thread. It is done while there is only one, and those that
//! it starts inherit it.

use anyhow::{Context, ensure};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, getgid, getuid, set_dumpable_behavior};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, Gid, Uid, capabilities,
    clear_ambient_capability_set, configure_capability_in_ambient_set,
    remove_capability_from_bounding_set, set_capabilities, set_capabilities_secure_bits,
    set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::words::User;

/// Becomes a user without groups, if we may. Capabilities stay until they are dropped.
///
/// # Errors
///
/// When we are somebody else and must stay that.
pub(crate) fn change(user: User) -> anyhow::Result<()> {
    if (getuid().as_raw(), getgid().as_raw()) == (user.user, user.group)
        && !may(CapabilitySet::SETGID)
    {
        return Ok(());
    }
    ensure!(
        may(CapabilitySet::SETUID) && may(CapabilitySet::SETGID),
        "{}",
        cannot_change(user, getuid().as_raw())
    );
    let (uid, gid) = (Uid::from_raw(user.user), Gid::from_raw(user.group));
    set_thread_groups(&[]).context("no groups")?;
    set_thread_res_gid(gid, gid, gid).with_context(|| format!("group {}", user.group))?;
    set_thread_res_uid(uid, uid, uid).with_context(|| format!("user {}", user.user))
}

/// Why this user does not become another one. Root without its capabilities is no root.
fn cannot_change(user: User, us: u32) -> String {
    let out = match us {
        0 => "give it the capabilities SETUID and SETGID, which it lost (--cap-add SETUID,SETGID)",
        _ => "start it as root, or as that user",
    };
    format!("user={user}: user {us} may not become another one: {out}")
}

/// Whether we have a capability.
fn may(what: CapabilitySet) -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(what))
}

/// What programs that we start could get back goes first: only who may change it can give it up.
///
/// # Errors
///
/// When the kernel refuses what it should not.
pub(crate) fn close_ways_back(keep: CapabilitySet) -> anyhow::Result<()> {
    clear_ambient_capability_set().context("ambient capabilities")?;
    if !may(CapabilitySet::SETPCAP) {
        // Nothing is gained by programs all the same, of which there are none.
        return Ok(());
    }
    close_bounding_set(keep)?;
    type Bits = CapabilitiesSecureBits;
    let bits = Bits::NO_ROOT
        | Bits::NO_ROOT_LOCKED
        | Bits::NO_SETUID_FIXUP
        | Bits::NO_SETUID_FIXUP_LOCKED
        | Bits::KEEP_CAPS_LOCKED
        | Bits::NO_CAP_AMBIENT_RAISE
        | Bits::NO_CAP_AMBIENT_RAISE_LOCKED;
    set_capabilities_secure_bits(bits).context("secure bits")
}

/// Takes from what programs could ever get, if we may.
fn close_bounding_set(keep: CapabilitySet) -> anyhow::Result<()> {
    if !may(CapabilitySet::SETPCAP) {
        return Ok(());
    }
    for number in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if keep.contains(one) {
            continue;
        }
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // It is one more than this kernel knows.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(error).with_context(|| format!("capability {number}")),
        }
    }
    Ok(())
}

/// Gives up all capabilities but those that stay, and that anything could bring them back.
///
/// # Errors
///
/// When the kernel refuses, which it should not.
pub(crate) fn drop_capabilities(keep: CapabilitySet) -> anyhow::Result<()> {
    let mut sets = capabilities(None).context("capabilities")?;
    for set in [&mut sets.effective, &mut sets.permitted] {
        *set &= keep;
    }
    let sets = CapabilitySets { inheritable: CapabilitySet::empty(), ..sets };
    set_capabilities(None, sets).context("capabilities")?;
    set_no_new_privs(true).context("no new privileges")
}

/// Keeps these capabilities alone, if they are there, for this thread and the programs that it
/// starts, whoever their user is.
///
/// # Errors
///
/// When the kernel refuses, which it should not.
pub(crate) fn keep_for_programs(rights: CapabilitySet) -> anyhow::Result<()> {
    close_bounding_set(rights)?;
    let mut sets = capabilities(None).context("capabilities")?;
    let kept = sets.permitted & rights;
    sets = CapabilitySets { effective: kept, permitted: kept, inheritable: kept };
    set_capabilities(None, sets).context("capabilities")?;
    clear_ambient_capability_set().context("ambient capabilities")?;
    for right in kept.iter() {
        configure_capability_in_ambient_set(right, true).context("ambient capabilities")?;
    }
    set_no_new_privs(true).context("no new privileges")
}

/// No other process of this user reads our memory, and none of it is in a core dump.
///
/// # Errors
///
/// When the kernel refuses, which it should not.
pub(crate) fn hide() -> anyhow::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("not dumpable")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn root_that_lost_its_capabilities_is_told_which() {
        let user = User { user: 10001, group: 10001 };
        let (root, other) = (cannot_change(user, 0), cannot_change(user, 1000));
        assert!(root.contains("--cap-add SETUID,SETGID") && !root.contains("as root"), "{root}");
        assert!(other.ends_with("start it as root, or as that user"), "{other}");
    }
}
