//! Counts tests that passed, failed and were skipped, from the output of all tests, checks the
//! skips against `tests/skips`, and lists which suites ran on whose extensions.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, ensure};

use crate::lab;

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: usize,
    pub failed: usize,
    /// `TEST: REASON`, for tests or parts of tests that did not run.
    pub skips: Vec<String>,
    /// Names of suites, by where their guests ran.
    places: BTreeMap<String, BTreeSet<String>>,
}

impl Tally {
    /// Reads the lines of libtest and of `skip`. They may begin anywhere in a line, because libtest
    /// ends its own only once a test is over. `suites` is the text of `tests/suites`, and `host` is
    /// this host's own KVM, on which guests run whose suite does not say another place.
    pub fn read(output: &str, suites: &str, host: Option<&str>) -> Self {
        let mut tally = Self::default();
        let (mut whole, mut before, mut suite, mut places) = (0, 0, "", Vec::new());
        for line in output.lines() {
            if let Some(name) = running(line) {
                (suite, before) = (name, whole);
                places = host.filter(|_| uses_kvm(suites, suite)).into_iter().collect();
            } else if let Some((_, place)) = line.split_once(lab::RUNS_ON) {
                places.push(place.trim_end());
            } else if let Some((_, rest)) = line.split_once("test result: ") {
                let [passed, failed] =
                    [" passed;", " failed;"].map(|word| number_before(rest, word));
                (tally.passed, tally.failed) = (tally.passed + passed, tally.failed + failed);
                // A suite may have skipped all its tests.
                if passed + failed > whole - before {
                    places.drain(..).for_each(|place| tally.ran(suite, place));
                }
            } else if let Some((_, what)) = line.split_once(skip::PART) {
                tally.skips.push(what.trim_end().to_owned());
            } else if let Some((_, what)) = line.split_once(skip::WHOLE) {
                tally.skips.push(what.trim_end().to_owned());
                // libtest, whose names have modules, counts a skipped test as passed. Our suites
                // do so only with those that their bodies skip.
                let name = what.split_once(": ").map_or(what, |it| it.0);
                let passes = name.contains("::") || !what.contains(lab::THOROUGH);
                whole += usize::from(passes);
            }
        }
        tally.passed = tally.passed.saturating_sub(whole);
        tally
    }

    fn ran(&mut self, suite: &str, place: &str) {
        self.places.entry(place.to_owned()).or_default().insert(suite.to_owned());
    }

    /// The places with their suites, the skips, grouped by reason, then the line with the counts.
    pub fn summary(&self) -> String {
        let mut reasons = BTreeMap::<_, Vec<_>>::new();
        for skip in &self.skips {
            let (test, reason) = skip.split_once(": ").unwrap_or((skip, "no reason"));
            reasons.entry(reason).or_default().push(test);
        }
        let mut text = String::new();
        for (reason, tests) in reasons {
            writeln!(text, "skipped, because {reason}: {}", tests.join(", ")).ok();
        }
        for (place, suites) in &self.places {
            let suites: Vec<_> = suites.iter().map(String::as_str).collect();
            writeln!(text, "ran on {place}: {}", suites.join(", ")).ok();
        }
        let Self { passed, failed, skips, .. } = self;
        writeln!(text, "{passed} passed, {failed} failed, {} skipped", skips.len()).ok();
        text
    }
}

/// The name in cargo's line for a program with tests:
/// `Running tests/x.rs (target/PROFILE/deps/NAME-HASH)`.
pub(crate) fn running(line: &str) -> Option<&str> {
    let (_, path) = line.trim_start().strip_prefix("Running ")?.split_once(" (")?;
    let (_, file) = path.strip_suffix(')')?.rsplit_once("/deps/")?;
    Some(file.rsplit_once('-')?.0)
}

/// Whether a suite starts guests on this host's own KVM, by its needs.
fn uses_kvm(suites: &str, suite: &str) -> bool {
    let mut rows = suites.lines().map(|line| line.split(" | ").collect::<Vec<_>>());
    rows.any(|row| row[0] == suite && row.len() == 4 && row[2].split(", ").any(|it| it == "kvm"))
}

fn number_before(text: &str, word: &str) -> usize {
    let before = text.split_once(word).and_then(|(before, _)| before.rsplit(' ').next());
    before.and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// A line of `tests/skips`.
struct Rule<'a> {
    host: &'a str,
    pattern: &'a str,
}

/// Skips that the list does not allow on a host of these kinds.
pub fn refused<'a>(skips: &'a [String], list: &str, host: &[&str]) -> anyhow::Result<Vec<&'a str>> {
    let rules: Vec<_> =
        list.lines().filter_map(|it| rule(it).transpose()).collect::<Result<_, _>>()?;
    let may = |skip: &str| rules.iter().any(|it| host.contains(&it.host) && fits(it.pattern, skip));
    Ok(skips.iter().map(String::as_str).filter(|skip| !may(skip)).collect())
}

fn rule(line: &str) -> anyhow::Result<Option<Rule<'_>>> {
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let parts: Vec<_> = line.split(" | ").collect();
    let [host, pattern, _why] = parts[..] else {
        anyhow::bail!("tests/skips: {line}: the format is HOST | TEST: REASON | why");
    };
    ensure!(HOSTS.contains(&host), "tests/skips: {line}: HOST must be one of {}", HOSTS.join(", "));
    Ok(Some(Rule { host, pattern }))
}

/// `*` stands for any text.
pub(crate) fn fits(pattern: &str, text: &str) -> bool {
    let Some((before, after)) = pattern.split_once('*') else { return pattern == text };
    let Some(rest) = text.strip_prefix(before) else { return false };
    (0..=rest.len()).any(|at| rest.get(at..).is_some_and(|rest| fits(after, rest)))
}

const HOSTS: [&str; 8] =
    ["any", "part", "full-kvm", "paravirtual-kvm", "no-kvm", "no-vhost", "container", "foreign"];

/// The kinds of host in `tests/skips` that apply to this one.
pub fn this_host() -> Vec<&'static str> {
    let there = |path: &str| Path::new(path).exists();
    let kvm = match vmm::kvm::KvmSupport::of_this_host() {
        vmm::kvm::KvmSupport::Full => "full-kvm",
        vmm::kvm::KvmSupport::Paravirtual => "paravirtual-kvm",
        vmm::kvm::KvmSupport::None => "no-kvm",
    };
    let others = [
        ("part", !lab::everything()),
        ("no-vhost", !there("/dev/vhost-net")),
        ("container", !there("/run/udev/control")),
        ("foreign", !there("/usr/bin/dpkg-query")),
    ];
    let mut host = vec!["any", kvm];
    host.extend(others.into_iter().filter(|it| it.1).map(|it| it.0));
    host
}

/// Prints the counts of the output in a file. Returns false if a skip is not allowed on this host.
pub fn close(output: &Path) -> anyhow::Result<bool> {
    let text = std::fs::read(output).with_context(|| output.display().to_string())?;
    let table = |name: &str| {
        let path = lab::repository().join(name);
        std::fs::read_to_string(path).with_context(|| name.to_owned())
    };
    let host = this_host();
    let kvm = (!host.contains(&"no-kvm")).then(lab::this_host);
    let suites = table("tests/suites")?;
    let tally = Tally::read(&String::from_utf8_lossy(&text), &suites, kvm.as_deref());
    let list = table("tests/skips")?;
    let refused = refused(&tally.skips, &list, &host)?;
    for skip in &refused {
        crate::say!("not allowed to be skipped on this host ({}): {skip}", host.join(", "));
    }
    crate::say!("{}", tally.summary().trim_end());
    Ok(refused.is_empty())
}

#[cfg(test)]
mod test {
    use super::*;

    const OUTPUT: &str = "\
running 3 tests
test a ... not run here: c: there is no x
ok
test b ... ok
test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 4 filtered out; finished in 0.01s
not run here, in part: b through y: there is no y\r
not run here: linux: TRANSOM_TESTS is not all
test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s
";

    #[test]
    fn a_test_that_did_not_run_has_not_passed() {
        let tally = Tally::read(OUTPUT, "", None);
        assert_eq!((tally.passed, tally.failed), (4, 1));
        assert_eq!(
            tally.skips,
            ["c: there is no x", "b through y: there is no y", "linux: TRANSOM_TESTS is not all"]
        );
        let summary = tally.summary();
        assert!(summary.ends_with("\n4 passed, 1 failed, 3 skipped\n"), "{summary}");
        assert!(summary.contains("skipped, because there is no y: b through y\n"), "{summary}");
        assert_eq!(Tally::read("", "", None).summary(), "0 passed, 0 failed, 0 skipped\n");
    }

    #[test]
    fn suites_are_listed_by_where_their_guests_ran() {
        const OUTPUT: &str = "\
     Running unittests src/lib.rs (/t/test-fast/deps/boot-0a)
test result: ok. 1 passed; 0 failed; 0 ignored
     Running tests/probe.rs (/t/test-fast/deps/probe-0b)
test result: ok. 1 passed; 0 failed; 0 ignored
     Running linux.rs (target/test-fast/deps/linux-1c)
guests run on: the lab
test result: FAILED. 0 passed; 1 failed; 0 ignored
     Running pod_agent.rs (target/test-fast/deps/pod_agent-1c)
guests run on: the lab\r
test result: ok. 1 passed; 0 failed; 0 ignored
     Running tests/windrv.rs (/t/test-fast/deps/windrv-0b)
guests run on: the lab
SKIP a::b: there is no source
test result: ok. 1 passed; 0 failed; 0 ignored
";
        const SUITES: &str = "probe | b | kvm | 2\npod_agent | b: c | root, kvm | 0.1\n\
                              linux | d | lab | 6\nboot | e | - | 1";
        let output = OUTPUT.replace("SKIP ", skip::WHOLE);
        let summary = |host| Tally::read(&output, SUITES, host).summary();
        let lab = "\nran on the lab: linux, pod_agent\n3 passed";
        assert!(summary(None).contains(lab), "{}", summary(None));
        let here = format!("\nran on KVM: pod_agent, probe{lab}");
        assert!(summary(Some("KVM")).contains(&here), "{}", summary(Some("KVM")));
    }

    #[test]
    fn skips_missing_from_this_hosts_list_are_refused() {
        let skips = Tally::read(OUTPUT, "", None).skips;
        let list = "# why\n\npart | *: TRANSOM_TESTS is not all | long\n\
                    no-vhost | b through*: * | as c\n";
        assert_eq!(refused(&skips, list, &["any"]).unwrap().len(), 3);
        assert_eq!(refused(&skips, list, &["part", "no-vhost"]).unwrap(), ["c: there is no x"]);
        assert!(refused(&skips, "nowhere | * | why", &[]).is_err());
        assert!(refused(&skips, "any | *", &[]).is_err());
    }

    #[test]
    fn the_skip_list_parses_and_allows_no_missing_package_on_debian() {
        let list = include_str!("../skips");
        let skips = ["iasl: iasl of the package acpica-tools does not start: x".to_owned()];
        let host: Vec<_> = HOSTS.into_iter().filter(|it| *it != "foreign").collect();
        assert_eq!(refused(&skips, list, &host).unwrap(), skips);
        let full = ["says_who: there is no usable /dev/kvm".to_owned()];
        assert_eq!(refused(&full, list, &["any", "full-kvm", "paravirtual-kvm"]).unwrap(), full);
    }
}
