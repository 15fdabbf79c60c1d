//! The shared folder through the user-mode network: Samba's `smbclient` in the guest's namespace,
//! and the server's own process.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use container::shared_folder::{self, Config, Connector, Folder};

use super::world::{Service, TIMEOUT};
use super::{Net, isolated};

/// The owner of the folder.
const OWNER: (u32, u32) = (4242, 4343);

/// The folder and its server. The process ends when the network does.
struct Shared {
    folder: tempfile::TempDir,
    process: Child,
}

impl Shared {
    fn start() -> anyhow::Result<(Self, Connector)> {
        let folder = tempfile::tempdir()?;
        chown(folder.path(), Some(OWNER.0), Some(OWNER.1))?;
        let (mut command, connector) = Self::command(folder.path())?;
        Ok((Self { process: command.spawn()?, folder }, connector))
    }

    fn command(folder: &Path) -> anyhow::Result<(Command, Connector)> {
        let config = Config {
            user: "Docker".into(),
            password: "secret".into(),
            read_only: false,
            folders: vec![Folder { name: "Data".into(), path: folder.into(), on_volume: true }],
            debug: false,
        };
        shared_folder::command(Path::new(env!("CARGO_BIN_EXE_transom")), &config)
    }

    /// The process of the server, which `process` has started.
    fn server(&self) -> anyhow::Result<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.process.id());
        let mut found = None;
        super::until("the server runs", || {
            let children = fs::read_to_string(&path).unwrap_or_default();
            found = children.trim().parse().ok();
            found.is_some()
        })?;
        found.context("no server")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

fn client(net: &Net, account: &str, words: &str) -> anyhow::Result<(bool, String)> {
    let local = net.folder.path().display();
    let line = format!("cd {local} && smbclient //host.lan/Data -U '{account}' {words}");
    let (status, said) = net.world.guest.attempt(&line)?;
    Ok((status == Some(0) && !said.contains("NT_STATUS"), said))
}

#[test]
fn the_shared_folder_is_at_the_gateway() {
    isolated(|| {
        let (shared, connector) = Shared::start()?;
        let net = Net::with_share(1500, |_| (), Some(connector))?;
        let run = |words: &str| -> anyhow::Result<String> {
            let words = format!("-I 10.77.0.1 -c '{words}'");
            let (good, said) = client(&net, "WIN\\docker%secret", &words)?;
            ensure!(good, "{words}: {said}");
            Ok(said)
        };
        fs::write(shared.path("there"), "from the host")?;
        fs::write(net.folder.path().join("new"), "from the guest")?;
        run("put new; get there")?;
        let written = Instant::now();
        ensure!(fs::read(shared.path("new"))? == b"from the guest");
        ensure!(written.elapsed() < Duration::from_secs(1));
        ensure!(fs::read(net.folder.path().join("there"))? == b"from the host");
        let found = fs::metadata(shared.path("new"))?;
        ensure!((found.uid(), found.gid()) == OWNER, "{found:?}");
        run("utimes new -1 -1 2001:01:01-12:00:00 -1")?;
        ensure!(fs::metadata(shared.path("new"))?.mtime() / 86_400 == 11_323, "the time is lost");
        // Guests of old versions of the reference image have this address in their `hosts`.
        let (good, said) = client(&net, "docker%secret", "-I 20.20.20.1 -c ls")?;
        ensure!(good && said.contains("there"), "{said}");
        Ok(())
    });
}

#[test]
fn changes_of_a_folder_are_reported() {
    isolated(|| {
        let (shared, connector) = Shared::start()?;
        let net = Net::with_share(1500, |_| (), Some(connector))?;
        fs::create_dir(shared.path("folder"))?;
        let watch = "timeout 10 stdbuf -oL smbclient //host.lan/Data -U docker%secret \
                     -I 10.77.0.1 -c 'notify folder'";
        let changes = format!(
            "{watch} & for n in $(seq 8); do sleep 1; echo $n > {}; done; wait",
            shared.path("folder/seen").display()
        );
        let (_, said) = net.world.guest.attempt(&changes)?;
        ensure!(said.contains("seen"), "{said}");
        Ok(())
    });
}

#[test]
fn strangers_and_links_lead_nowhere() {
    isolated(|| {
        let (shared, connector) = Shared::start()?;
        let net = Net::with_share(1500, |_| (), Some(connector))?;
        symlink("/etc/passwd", shared.path("link"))?;
        symlink("/", shared.path("root"))?;
        for (account, options) in [
            ("docker%wrong", ""),
            ("root%secret", ""),
            ("%", "-N"),
            ("docker%secret", "-m NT1 --option='client min protocol=NT1'"),
        ] {
            let words = format!("-I 10.77.0.1 {options} -c ls");
            let (good, said) = client(&net, account, &words)?;
            ensure!(!good && !said.contains("blocks of size"), "{account} {options}: {said}");
        }
        for command in ["get link", "get root/etc/passwd", "get ../etc/passwd", "cd root"] {
            let words = format!("-I 10.77.0.1 -c '{command}'");
            let (good, said) = client(&net, "docker%secret", &words)?;
            ensure!(!good, "{command}: {said}");
        }
        // The gateway has no other port, and outside hosts have no share.
        let (status, said) = net.world.guest.attempt("nc -nvz -w 5 10.77.0.1 139")?;
        ensure!(status == Some(1), "{said}");
        let (status, said) = net.world.outside.attempt("nc -nvz -w 5 10.77.0.2 445")?;
        ensure!(status == Some(1) && said.contains("refused"), "{said}");
        Ok(())
    });
}

#[test]
fn the_server_has_no_rights_and_ends_with_the_network() {
    isolated(|| {
        let (mut shared, connector) = Shared::start()?;
        let net = Net::with_share(1500, |_| (), Some(connector))?;
        fs::set_permissions(shared.folder.path(), fs::Permissions::from_mode(0o700))?;
        let (good, said) = client(&net, "docker%secret", "-I 10.77.0.1 -c 'mkdir made'")?;
        ensure!(good, "{said}");
        let status = fs::read_to_string(format!("/proc/{}/status", shared.server()?))?;
        let none = "0000000000000000";
        for line in [
            format!("Uid:\t{0}\t{0}\t{0}\t{0}", OWNER.0),
            format!("Gid:\t{0}\t{0}\t{0}\t{0}", OWNER.1),
            format!("CapEff:\t{none}"),
            format!("CapPrm:\t{none}"),
            format!("CapBnd:\t{none}"),
            "NoNewPrivs:\t1".into(),
            "Seccomp:\t2".into(),
        ] {
            ensure!(status.lines().any(|it| it == line), "{line}: {status}");
        }
        let threads = |status: &str| status.lines().any(|it| it == "Threads:\t1");
        let path = format!("/proc/{}/status", shared.server()?);
        super::until("the connection's thread ends", || {
            fs::read_to_string(&path).is_ok_and(|it| threads(&it))
        })?;
        drop(net);
        let start = Instant::now();
        while shared.process.try_wait()?.is_none() {
            ensure!(start.elapsed() < TIMEOUT, "the server runs without a pod");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    });
}

#[test]
fn a_server_that_was_killed_is_started_again() {
    isolated(|| {
        let (shared, connector) = Shared::start()?;
        let net = Net::with_share(1500, |_| (), Some(connector))?;
        fs::write(shared.path("there"), "from the host")?;
        let is_served = || client(&net, "docker%secret", "-I 10.77.0.1 -c ls");
        ensure!(is_served()?.0);
        for count in 0..2 {
            let server = shared.server()?;
            let killed = Instant::now();
            let pid = rustix::process::Pid::from_raw(server.cast_signed()).context("no process")?;
            rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
            // The client connects meanwhile, and waits for the next server.
            let (good, said) = is_served()?;
            ensure!(good && said.contains("there"), "{said}");
            let pause = Duration::from_secs(1 << count);
            ensure!(killed.elapsed() >= pause, "started again after {:?}", killed.elapsed());
            ensure!(shared.server()? != server, "the server was not killed");
        }
        Ok(())
    });
}

#[test]
fn a_folder_that_is_replaced_is_not_followed() {
    isolated(|| {
        let top = tempfile::tempdir()?;
        let path = top.path().join("shared");
        fs::create_dir(&path)?;
        fs::write(path.join("there"), "from the host")?;
        let (mut command, connector) = Shared::command(&path)?;
        fs::rename(&path, top.path().join("moved"))?;
        symlink("/etc", &path)?;
        let process = command.spawn()?;
        let _shared = Shared { folder: top, process };
        let net = Net::with_share(1500, |_| (), Some(connector))?;
        let (good, said) = client(&net, "docker%secret", "-I 10.77.0.1 -c ls")?;
        ensure!(good && said.contains("there") && !said.contains("passwd"), "{said}");
        Ok(())
    });
}

#[test]
fn many_connections_give_way_and_do_not_stay() {
    isolated(|| {
        let (shared, connector) = Shared::start()?;
        let net = Net::with_share(1500, |_| (), Some(connector))?;
        // More than the server takes. They send only empty messages.
        let many = "for n in $(seq 40); do \
                    timeout 20 nc 10.77.0.1 445 < /dev/zero > /dev/null & done; wait";
        let many = Service::start(&net.world.guest, &format!("sh -c '{many}'"))?;
        let path = format!("/proc/{}/status", shared.server()?);
        let threads = || -> Option<usize> {
            let status = fs::read_to_string(&path).ok()?;
            status.lines().find_map(|it| it.strip_prefix("Threads:\t"))?.parse().ok()
        };
        super::until("the places of strangers are taken", || threads() == Some(9))?;
        let (good, said) = client(&net, "docker%secret", "-I 10.77.0.1 -c ls")?;
        ensure!(good, "strangers keep the account out: {said}");
        ensure!(threads() >= Some(8), "the strangers have ended: {:?} threads", threads());
        drop(many);
        super::until("their threads end", || threads() == Some(1))
    });
}
