//! A fake machine answers at a control socket, and clients talk to it through a pipe.

use std::sync::Mutex as Shared;

use serde_json::{Value, json};
use tokio::io::{DuplexStream, duplex};
use tokio::task::JoinHandle;

use super::*;
use crate::settings::Compat;
use crate::settings::translate::monitor::Monitor;
use crate::settings::value::Value as _;

/// A test waits at most this long.
const SOON: Duration = Duration::from_secs(20);

/// Several questions are asked in this time while a client listens.
const IDLE: Duration = Duration::from_millis(3500);

/// The state of a fake machine.
#[derive(Default)]
struct Fake {
    paused: bool,
    resets: u64,
    commanded_resets: u64,
    /// The commands so far, except questions about the status.
    commands: Vec<Value>,
    /// Number of questions about the status.
    questions: u64,
    /// The machine ends when it is asked to.
    quits: bool,
}

impl Fake {
    fn answer(&mut self, command: Value) -> Value {
        match command["command"].as_str().unwrap() {
            "status" => {
                self.questions += 1;
                let state = if self.paused { "paused" } else { "running" };
                return json!({ "ok": { "state": state, "resets": self.resets,
                    "commanded_resets": self.commanded_resets,
                    "uuid": "564d1f3a-\u{1b}0000-4000-8000-000000000007",
                    "usb": ["usb-keyboard", "usb-tablet\u{7}"] } });
            }
            "pause" => self.paused = true,
            "resume" => self.paused = false,
            "reset" => {
                self.resets += 1;
                self.commanded_resets += 1;
            }
            "quit" if !self.quits => return json!({ "error": "it is\u{7} busy" }),
            _ => {}
        }
        self.commands.push(command);
        json!({ "ok": {} })
    }
}

struct Bench {
    folder: tempfile::TempDir,
    fake: Arc<Shared<Fake>>,
    monitors: Arc<Monitors>,
}

impl Bench {
    /// With a machine that runs.
    fn new() -> Self {
        let bench = Self::without_machine();
        let listener = UnixListener::bind(bench.monitors.control.clone()).unwrap();
        let (fake, monitors) = (bench.fake.clone(), bench.monitors.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let mut stream = BufReader::new(stream);
                let mut line = String::new();
                stream.read_line(&mut line).await.unwrap();
                let command: Value = serde_json::from_str(&line).unwrap();
                if command["command"] == "quit" && fake.lock().unwrap().quits {
                    // The process may be gone before its last answer is read.
                    timeout(Duration::ZERO, monitors.end(&Ok(0))).await.ok();
                }
                let answer = fake.lock().unwrap().answer(command);
                // The client may have left.
                stream.get_mut().write_all(format!("{answer}\n").as_bytes()).await.ok();
            }
        });
        bench
    }

    fn without_machine() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("vmm.sock");
        let monitors = Monitors::new(control, "box".into(), &[folder.path()]);
        Self { folder, fake: Arc::default(), monitors }
    }

    fn connect(&self, protocol: Protocol, rights: Rights) -> Peer {
        Self::connect_to(self.server(protocol, rights))
    }

    fn server(&self, protocol: Protocol, rights: Rights) -> Server {
        Server { protocol, rights, pause: Duration::ZERO, monitors: self.monitors.clone() }
    }

    fn connect_to(server: Server) -> Peer {
        let (ours, theirs) = duplex(1 << 16);
        let served = tokio::spawn(async move { server.serve(theirs).await });
        Peer { stream: BufReader::new(ours), served }
    }

    /// A client that has negotiated.
    async fn qmp(&self, rights: Rights) -> Peer {
        let mut peer = self.connect(Protocol::Qmp, rights);
        let greeting = peer.read().await;
        assert_eq!(greeting["QMP"]["capabilities"], json!([]));
        assert!(greeting["QMP"]["version"]["qemu"]["major"].is_u64(), "{greeting}");
        assert_eq!(peer.ask(json!({ "execute": "qmp_capabilities" })).await["return"], json!({}));
        peer
    }
}

struct Peer {
    stream: BufReader<DuplexStream>,
    served: JoinHandle<io::Result<()>>,
}

impl Peer {
    async fn write(&mut self, text: &str) {
        self.stream.get_mut().write_all(text.as_bytes()).await.unwrap();
    }

    async fn read(&mut self) -> Value {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line);
        timeout(SOON, read).await.expect("an answer").unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    async fn ask(&mut self, request: Value) -> Value {
        self.write(&request.to_string()).await;
        self.read().await
    }

    async fn execute(&mut self, command: &str) -> Value {
        self.ask(json!({ "execute": command })).await
    }

    /// The output of a line of the human monitor through QMP.
    async fn line(&mut self, line: &str) -> String {
        let arguments = json!({ "command-line": line });
        let request = json!({ "execute": "human-monitor-command", "arguments": arguments });
        self.ask(request).await["return"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn commands_need_the_negotiation_first() {
    let bench = Bench::new();
    let mut peer = bench.connect(Protocol::Qmp, Rights::All);
    peer.read().await;
    let early = peer.ask(json!({ "execute": "query-status", "id": 7 })).await;
    assert_eq!((&early["error"]["class"], &early["id"]), (&json!("CommandNotFound"), &json!(7)));
    let enable = json!({ "enable": ["oob"] });
    let oob = peer.ask(json!({ "execute": "qmp_capabilities", "arguments": enable })).await;
    assert_eq!(oob["error"]["desc"], "Capability oob not available");
    assert_eq!(peer.execute("qmp_capabilities").await["return"], json!({}));
    let again = peer.execute("qmp_capabilities").await;
    assert_eq!(again["error"]["class"], "CommandNotFound");
    for request in ["{\"execute\":\"query-status\"}", "{ 'execute': 'query-status' }\n"] {
        peer.write(request).await;
        let status = peer.read().await;
        assert_eq!(status["return"], json!({ "running": true, "status": "running" }));
    }
    for (request, class) in [
        (json!({ "execute": "no-such-command" }), "CommandNotFound"),
        (json!({ "execute": "stop", "arguments": { "x": 1 } }), "GenericError"),
        (json!({ "execute": "send-key" }), "GenericError"),
        (json!({ "execute": "device_del", "arguments": { "id": "x" } }), "DeviceNotFound"),
    ] {
        assert_eq!(peer.ask(request.clone()).await["error"]["class"], class, "{request}");
    }
    assert!(bench.fake.lock().unwrap().commands.is_empty());
}

#[tokio::test]
async fn commands_reach_the_machine_and_are_reported_as_events() {
    let bench = Bench::new();
    let mut peer = bench.qmp(Rights::All).await;
    for (command, event) in [("stop", "STOP"), ("cont", "RESUME")] {
        assert_eq!(peer.execute(command).await["event"], event);
        assert_eq!(peer.read().await["return"], json!({}), "{command}");
    }
    // Scripts that read one line take it for the answer.
    for (command, event) in [("system_reset", "RESET"), ("system_powerdown", "POWERDOWN")] {
        assert_eq!(peer.execute(command).await["return"], json!({}), "{command}");
        let said = peer.read().await;
        assert_eq!(said["event"], event, "{said}");
        let data = json!({ "guest": false, "reason": "host-qmp-system-reset" });
        assert!(event != "RESET" || said["data"] == data, "{said}");
    }
    let keys = json!([{ "type": "qcode", "data": "ctrl" }, { "type": "number", "data": 57 }]);
    let arguments = json!({ "keys": keys, "hold-time": 100 });
    assert!(
        peer.ask(json!({ "execute": "send-key", "arguments": arguments })).await["return"]
            .is_object()
    );
    assert_eq!(peer.line("sendkey meta_l-r").await, "");
    let refused = peer.execute("quit").await;
    assert_eq!(refused["error"], json!({ "class": "GenericError", "desc": "it is\u{7} busy" }));
    let commands = bench.fake.lock().unwrap().commands.clone();
    let names: Vec<_> = commands.iter().map(|it| it["command"].as_str().unwrap()).collect();
    assert_eq!(names, ["pause", "resume", "reset", "powerdown", "key", "key"]);
    assert_eq!(
        (&commands[4]["keys"], &commands[5]["keys"]),
        (&json!("ctrl-space"), &json!("logo-0x13"))
    );
}

#[tokio::test]
async fn the_guests_resets_and_the_end_are_reported() {
    let bench = Bench::new();
    let watched = bench.monitors.clone();
    tokio::spawn(async move { watched.events.watch().await });
    // Without a client, nothing is asked.
    sleep(IDLE).await;
    assert_eq!(bench.fake.lock().unwrap().questions, 0);
    let mut peer = bench.qmp(Rights::Harmless).await;
    bench.fake.lock().unwrap().resets += 1;
    let reset = peer.read().await;
    assert_eq!((&reset["event"], &reset["data"]["guest"]), (&json!("RESET"), &json!(true)));
    bench.monitors.end(&Ok(0)).await;
    let end = peer.read().await;
    let data = json!({ "guest": true, "reason": "guest-shutdown" });
    assert_eq!((&end["event"], &end["data"]), (&json!("SHUTDOWN"), &data));
    timeout(SOON, peer.served).await.expect("an end").unwrap().unwrap_err();
    // A question may be under way.
    let asked = bench.fake.lock().unwrap().questions + 1;
    sleep(IDLE).await;
    assert!(bench.fake.lock().unwrap().questions <= asked, "it is asked without a client");
    // Changes before a client came are not reported to it.
    bench.fake.lock().unwrap().resets += 1;
    let mut peer = bench.qmp(Rights::Harmless).await;
    bench.fake.lock().unwrap().paused = true;
    assert_eq!(peer.read().await["event"], "STOP");
}

#[tokio::test]
async fn a_reset_by_the_guest_is_not_that_of_a_client() {
    let bench = Bench::new();
    let mut peer = bench.qmp(Rights::All).await;
    bench.fake.lock().unwrap().resets += 1;
    assert_eq!(peer.execute("system_reset").await["return"], json!({}));
    for guest in [true, false] {
        let reset = peer.read().await;
        assert_eq!((&reset["event"], &reset["data"]["guest"]), (&json!("RESET"), &json!(guest)));
    }
}

#[tokio::test]
async fn quit_is_answered_before_the_end_is_reported() {
    let bench = Bench::new();
    bench.fake.lock().unwrap().quits = true;
    let mut peer = bench.qmp(Rights::All).await;
    assert_eq!(peer.execute("quit").await["return"], json!({}));
    let end = peer.read().await;
    let data = json!({ "guest": false, "reason": "host-qmp-quit" });
    assert_eq!((&end["event"], &end["data"]), (&json!("SHUTDOWN"), &data));
}

#[tokio::test]
async fn the_reason_of_the_end_is_reported() {
    for (status, guest, reason) in [
        (Ok(0), true, "guest-shutdown"),
        (Ok(SIGNALS + 15), false, "host-signal"),
        (Ok(1), false, "host-error"),
        (Err(anyhow::anyhow!("it was killed")), false, "host-error"),
    ] {
        let bench = Bench::new();
        let mut peer = bench.qmp(Rights::All).await;
        bench.monitors.end(&status).await;
        let data = peer.read().await["data"].clone();
        assert_eq!(data, json!({ "guest": guest, "reason": reason }));
    }
}

#[tokio::test]
async fn a_client_that_misses_events_is_disconnected() {
    let bench = Bench::new();
    let peer = bench.qmp(Rights::All).await;
    for _ in 0..100 {
        bench.monitors.report_powerdown();
    }
    let served = timeout(SOON, peer.served).await.expect("an end");
    served.unwrap().unwrap_err();
}

#[tokio::test]
async fn other_hosts_get_a_pause_between_answers() {
    const REQUESTS: u32 = 20;
    const PAUSE: Duration = Duration::from_millis(20);
    let bench = Bench::new();
    for (address, is_exposed) in [("0.0.0.0:1", true), ("127.0.0.1:1", false)] {
        let place = Place::Tcp(address.parse().unwrap());
        let server = Server::at(&place, Protocol::Qmp, bench.monitors.clone());
        assert_eq!(server.rights == Rights::Harmless, is_exposed, "{address}");
        assert_eq!(server.pause >= Duration::from_millis(10), is_exposed, "{address}");
    }
    for (protocol, request) in [(Protocol::Qmp, "{}"), (Protocol::Human, "help\n")] {
        let server = Server { pause: PAUSE, ..bench.server(protocol, Rights::Harmless) };
        let mut peer = Bench::connect_to(server);
        let start = Instant::now();
        peer.write(&request.repeat(REQUESTS as usize)).await;
        peer.stream.get_mut().shutdown().await.unwrap();
        let mut all = String::new();
        timeout(SOON, peer.stream.read_to_string(&mut all)).await.expect("an end").unwrap();
        let answers = all.matches("lacks member").count() + all.matches("cont -- resume").count();
        assert_eq!(answers, REQUESTS as usize, "{all}");
        assert!(start.elapsed() >= PAUSE * REQUESTS, "{:?}", start.elapsed());
    }
}

#[tokio::test]
async fn an_exposed_listener_answers_only_harmless_commands() {
    let bench = Bench::new();
    let mut peer = bench.qmp(Rights::Harmless).await;
    let commands = peer.execute("query-commands").await;
    let names: Vec<_> =
        commands["return"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
    for command in
        ["stop", "cont", "quit", "system_reset", "system_powerdown", "send-key", "screendump"]
    {
        assert!(!names.contains(&&json!(command)), "{command}");
        let refused = peer.execute(command).await;
        let text = refused["error"]["desc"].as_str().unwrap();
        assert!(text.contains("not allowed here, because other hosts"), "{refused}");
        let typed = peer.line(&format!("{} a", command.replace("send-key", "sendkey"))).await;
        assert!(typed.contains("not allowed here"), "{command}: {typed}");
    }
    for word in ["c", "q", "s"] {
        assert!(peer.line(word).await.contains("not allowed here"), "{word}");
    }
    assert!(bench.fake.lock().unwrap().commands.is_empty());
    // WinBoat's calls.
    for command in ["query-commands", "query-status", "human-monitor-command", "device_add"] {
        assert!(names.contains(&&json!(command)), "{command}");
    }
    let tree = peer.line("info qtree").await;
    assert!(tree.contains("dev: usb-tablet, id \"usb-tablet\""), "{tree}");
    let arguments = json!({ "driver": "usb-host", "id": "1133:49970", "vendorid": 1133,
        "productid": 49970, "hostdevice": "/dev/bus/usb/001/004" });
    let added = peer.ask(json!({ "execute": "device_add", "arguments": arguments })).await;
    assert_eq!(added["error"]["class"], "GenericError");
    assert!(added["error"]["desc"].as_str().unwrap().contains("127.0.0.1 or unix:PATH"), "{added}");
    // Where no other host can reach it, the device is looked for.
    let mut peer = bench.qmp(Rights::All).await;
    let mut add = async |arguments: Value| {
        let added = peer.ask(json!({ "execute": "device_add", "arguments": arguments })).await;
        added["error"]["desc"].as_str().unwrap().to_owned()
    };
    assert_eq!(add(arguments).await, "there is no machine yet", "only in this test");
    for (arguments, reason) in [
        (json!({ "driver": "usb-host", "id": "a" }), "needs vendorid="),
        (json!({ "driver": "usb-host", "vendorid": 0x1_0000 }), "write a number"),
        (json!({ "driver": "usb-host", "hostdevice": "/dev/sda" }), "/dev/bus/usb/001/004"),
        (json!({ "driver": "vfio-pci" }), "not a valid device model"),
    ] {
        let error = add(arguments).await;
        assert!(error.contains(reason), "{error}");
    }
    let gone = peer.ask(json!({ "execute": "device_del", "arguments": { "id": "a" } })).await;
    assert_eq!(gone["error"]["class"], "DeviceNotFound");
}

#[tokio::test]
async fn lines_of_the_human_monitor_are_answered_with_a_prompt() {
    let bench = Bench::new();
    let mut peer = bench.connect(Protocol::Human, Rights::All);
    let mut all = String::new();
    for line in [
        "info status",
        "stop",
        "info status",
        "info usb",
        "nonsense",
        "info nonsense",
        "sendkey nokey",
        "sendkey",
        "info name",
        "info uuid",
        "quit",
        "screendump \"/no such/a\\\"b.png\"",
        "screendump -f png '/no such/c.png'",
        "screendump \"/tmp/a.png",
        "",
    ] {
        peer.write(&format!("{line}\n")).await;
    }
    peer.stream.get_mut().shutdown().await.unwrap();
    timeout(SOON, peer.stream.read_to_string(&mut all)).await.expect("an end").unwrap();
    let answers = [
        "QEMU 10.0.0 monitor - type 'help' for more information\r\n",
        "VM status: running\r\n",
        "",
        "VM status: paused\r\n",
        "  Device 0.1, Port 1, Speed 480 Mb/s, Product QEMU USB Keyboard, ID: usb-keyboard\r\n  \
         Device 0.2, Port 2, Speed 480 Mb/s, Product QEMU USB Tablet, ID: usb-tablet\r\n",
        "unknown command: 'nonsense'\r\n",
        "unknown command: 'info nonsense'\r\n",
        "Error: Parameter 'data' does not accept value 'nokey'\r\n",
        "Error: sendkey needs an argument: see help\r\n",
        "box\r\n",
        // Without the machine's control characters.
        "564d1f3a-0000-4000-8000-000000000007\r\n",
        "Error: it is busy\r\n",
        "Error: /no such/a\"b.png: No such file or directory (os error 2)\r\n",
        "Error: /no such/c.png: No such file or directory (os error 2)\r\n",
        "Error: a quote is not closed: add the closing one\r\n",
        "",
        "",
    ];
    assert_eq!(all, answers.join("(qemu) "));
}

#[tokio::test]
async fn a_browser_is_disconnected() {
    let bench = Bench::new();
    let body = "{\"execute\":\"qmp_capabilities\"}{\"execute\":\"stop\"}\nstop\n";
    let http = format!("POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n{body}");
    // A server chooses parts of the first message of TLS, such as the ticket of a session.
    let tls = format!("\u{16}\u{3}\u{1}\u{2}\0\u{1}\n{body}");
    let all = [Protocol::Qmp, Protocol::Human].map(|it| [(it, &http), (it, &tls)]);
    for (protocol, request) in all.into_iter().flatten() {
        let mut peer = bench.connect(protocol, Rights::All);
        peer.write(request).await;
        let mut all = String::new();
        timeout(SOON, peer.stream.read_to_string(&mut all)).await.expect("an end").unwrap();
        assert!(!all.contains("return"), "{all}");
    }
    assert!(bench.fake.lock().unwrap().commands.is_empty());
}

#[tokio::test]
async fn half_a_line_is_not_run() {
    let bench = Bench::new();
    for text in ["stop", "system_reset ", "{\"execute\":\"stop\"}"] {
        let mut peer = bench.connect(Protocol::Human, Rights::All);
        peer.write(text).await;
        peer.stream.get_mut().shutdown().await.unwrap();
        timeout(SOON, peer.served).await.expect("an end").unwrap().unwrap();
    }
    assert!(bench.fake.lock().unwrap().commands.is_empty());
}

#[tokio::test]
async fn a_client_that_does_not_read_is_disconnected() {
    let bench = Bench::without_machine();
    let mut peer = bench.connect(Protocol::Qmp, Rights::All);
    peer.write(&json!({ "execute": "qmp_capabilities" }).to_string()).await;
    let question = json!({ "execute": "query-commands" }).to_string();
    let asks = async {
        loop {
            if peer.stream.get_mut().write_all(question.as_bytes()).await.is_err() {
                return;
            }
        }
    };
    timeout(SOON, asks).await.expect("it is still served");
    assert_eq!(peer.served.await.unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
    // So is one that does not negotiate, whatever it sends meanwhile.
    let mut slow = bench.connect(Protocol::Qmp, Rights::All);
    slow.read().await;
    let dribbles = async {
        while slow.stream.get_mut().write_all(b" {}").await.is_ok() {
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(SOON, dribbles).await.expect("it is still served");
    assert_eq!(slow.served.await.unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
}

#[tokio::test]
async fn before_the_machine_starts_its_status_is_prelaunch() {
    let bench = Bench::without_machine();
    let mut peer = bench.qmp(Rights::All).await;
    let status = peer.execute("query-status").await;
    assert_eq!(status["return"], json!({ "running": false, "status": "prelaunch" }));
    let refused = peer.execute("system_reset").await;
    assert!(refused["error"]["desc"].as_str().unwrap().contains("it is starting"), "{refused}");
    assert_eq!(peer.line("info status").await, "VM status: paused (prelaunch)\r\n");
    let path = bench.folder.path().join("data.img");
    let arguments = json!({ "filename": path });
    let refused = peer.ask(json!({ "execute": "screendump", "arguments": arguments })).await;
    assert!(refused["error"]["desc"].as_str().unwrap().contains(".ppm or .png"), "{refused}");
}

#[tokio::test]
async fn a_listener_has_a_limit_of_clients_and_a_private_socket() {
    let bench = Bench::new();
    let path = bench.folder.path().join("new/qmp.sock");
    let server = || bench.server(Protocol::Qmp, Rights::All);
    // The socket of a killed pod is replaced, and another file is not.
    drop(server().listen(&Place::Unix(path.clone())).unwrap());
    let task = server().listen(&Place::Unix(path.clone())).unwrap();
    tokio::spawn(task);
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut clients = Vec::new();
    for _ in 0..MAX_CLIENTS {
        let mut client = BufReader::new(tokio::net::UnixStream::connect(&path).await.unwrap());
        client.read_line(&mut String::new()).await.unwrap();
        clients.push(client);
    }
    let mut refused = tokio::net::UnixStream::connect(&path).await.unwrap();
    let read = timeout(SOON, refused.read(&mut [0; 16])).await.expect("an end");
    assert!(!read.is_ok_and(|count| count > 0), "one client too many is served");
    let file = bench.folder.path().join("file");
    fs::write(&file, "kept").unwrap();
    assert!(server().listen(&Place::Unix(file.clone())).is_err());
    assert_eq!(fs::read_to_string(file).unwrap(), "kept");
}

#[tokio::test]
async fn listeners_are_those_of_all_settings() {
    let place = |text| Some(Monitor::read(text).unwrap());
    let mut settings = Settings::defaults();
    let shown = |settings: &Settings| {
        let all = settings.monitors().into_iter();
        all.map(|(protocol, place)| format!("{protocol:?} {}", place.show())).collect::<Vec<_>>()
    };
    assert_eq!(shown(&settings), [""; 0]);
    let bench = Bench::without_machine();
    assert!(open(&settings, &bench.monitors).unwrap().is_none());
    settings.pod.compat = Compat::Dockur;
    assert_eq!(shown(&settings), ["Human unix:/run/shm/monitor.sock"]);
    // The user's listener has the socket.
    settings.pod.qmp = place("unix:/run/shm/monitor.sock,server");
    settings.pod.monitor = place("stdio");
    assert_eq!(shown(&settings), ["Qmp unix:/run/shm/monitor.sock"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    settings.pod.compat = Compat::None;
    settings.pod.qmp = None;
    settings.pod.monitor = place(&format!("tcp:127.0.0.1:{port},server"));
    assert_eq!(settings.monitor_ports(), [port]);
    let error = open(&settings, &bench.monitors).err().unwrap();
    let start = format!("MONITOR: tcp:127.0.0.1:{port}: Address already in use");
    assert!(format!("{error:#}").starts_with(&start), "{error:#}");
}
