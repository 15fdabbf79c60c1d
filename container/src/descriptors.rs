//! The limit of open file descriptors of this process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The pod never needs more. Programs that it starts inherit the limit, and some of them close
/// every possible descriptor one by one.
const MAX_DESCRIPTORS: u64 = 16384;

/// Raises the soft limit to the hard one, up to 16384: container engines often set a soft limit of
/// 1024.
pub fn raise() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.unwrap_or(MAX_DESCRIPTORS).min(MAX_DESCRIPTORS);
    if current.is_some_and(|current| current < wanted) {
        // A process may always raise its soft limit. If this fails nevertheless, quotas are
        // smaller.
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).ok();
    }
}

pub fn limit() -> usize {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(limit).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_small_soft_limit_is_raised() {
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        let low = maximum.map_or(1000, |maximum| maximum.min(1000));
        setrlimit(Resource::Nofile, Rlimit { current: Some(low), maximum }).unwrap();
        raise();
        let wanted = maximum.unwrap_or(MAX_DESCRIPTORS).min(MAX_DESCRIPTORS);
        assert_eq!(limit() as u64, wanted);
        raise();
        assert_eq!(limit() as u64, wanted);
    }
}
